//! The table of functions in the README of a golden folder.

/// Names in the column `functions` of the README's table; `*` matches any letters. `None` without such a table.
pub fn functions(readme: &str) -> Option<Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        let cells = line.trim().trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect()
    };
    let mut lines = readme.lines();
    let column = lines.find_map(|line| cells(line).iter().position(|cell| cell == "functions"))?;
    let rows = lines.take_while(|line| line.trim().starts_with('|'));
    let named = rows.flat_map(|line| names(cells(line).get(column).map_or("", String::as_str)));
    Some(named.collect())
}

/// The words in backticks, up to a colon, which begins an explanation.
fn names(cell: &str) -> Vec<String> {
    let named = cell.split(':').next().unwrap_or_default();
    let words = named.split('`').skip(1).step_by(2);
    words.map(str::to_owned).collect()
}

/// Whether a name of the table matches a function.
pub fn matches(name: &str, function: &str) -> bool {
    match name.split_once('*') {
        None => name == function,
        Some((start, end)) => {
            let long = function.len() >= start.len() + end.len();
            long && function.starts_with(start) && function.ends_with(end)
        }
    }
}
