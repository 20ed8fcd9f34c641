//! What may follow a number without changing it: a unit, in words or signs.

/// Longest unit (bytes).
const LONGEST: usize = 200;
/// Words that change the number before them.
const CHANGES: &str = "or versus vs plus minus factorial mod modulo hundred hundreds thousand thousands million \
    millions billion billions trillion trillions lakh lakhs crore crores dozen dozens half \
    halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths \
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen \
    fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty \
    ninety sqrt sin cos tan log exp";
/// Words that change the number directly before them: `18 squared`, but not `18 feet squared`.
const POWERS: &str = "squared cubed";
/// Words that negate.
const NEGATIONS: &str = "not no never isn isnt wrong incorrect false unequal";
/// Known words of one and two letters. Other ones after a number are its factors: `18x`, `18 pi`.
const SHORT: &str = "m g h s l L d A V W J N C F a km cm mm dm nm kg mg kJ kW kN Hz Pa lb oz ft in yd mi ms hr pm \
    am AM PM mL ml dL cL cl KB kB MB GB TB th st nd rd an as at by he if is it me my of on so to \
    up us US we do be go Rs sq cu pt qt pc";
/// Words of three letters that may follow a number without a space; other letters there are factors: `18xyz`.
const ATTACHED: &str = "lbs yds hrs min sec mph kph kmh kgs gal pts USD EUR GBP day egg cup mol rpm kWh deg pct pcs \
    sqm cms kms";

/// Chinese and Japanese numerals and words that change or negate the number before them.
const EAST_ASIAN_CHANGES: &str = "零一二三四五六七八九十百千万萬亿億兆半两兩或不非没無";
/// Characters that are units or end a sentence.
const HARMLESS: &str = "%°′″$£€¥₹¢₽₩.,;!?*_`\"'’”“()[]✓✔✅";

/// Whether a word is one of a list, in upper or lower case.
fn is_in(list: &str, word: &str) -> bool {
    list.split_whitespace()
        .any(|known| known.eq_ignore_ascii_case(word))
}

/// Whether a word negates a statement.
pub(super) fn negates(word: &str) -> bool {
    is_in(NEGATIONS, word)
}

/// Whether a letter belongs to a script without spaces between words and with units of one letter.
fn is_east_asian(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}')
}

/// Whether `text`, which follows a number, is at most a unit.
pub(super) fn is_unit(text: &str) -> bool {
    if text.len() > LONGEST {
        return false;
    }
    let words: Vec<&str> = text
        .split(|c: char| !c.is_alphabetic())
        .filter(|word| !word.is_empty())
        .collect();
    let short = |word: &str| SHORT.split_whitespace().any(|known| known == word);
    let known = |word: &str, attached: bool| match word.chars().count() {
        _ if word.contains(is_east_asian) => !word.contains(|c| EAST_ASIAN_CHANGES.contains(c)),
        1 if attached => word != "a" && short(word),
        1 | 2 => short(word),
        3 if attached => is_in(ATTACHED, word),
        _ => true,
    };
    let attached = |at: usize| at == 0 && text.starts_with(char::is_alphabetic);
    let sound = words.iter().enumerate().all(|(at, word)| {
        let power = at == 0 && is_in(POWERS, word);
        known(word, attached(at)) && !is_in(CHANGES, word) && !negates(word) && !power
    });
    // `and a quarter` adds to the number.
    let adds = words
        .windows(2)
        .any(|pair| is_in("and", pair[0]) && is_in("a an", pair[1]));
    sound && !adds && sound_signs(text)
}

/// Whether all characters are those of units: letters, blanks, marks, powers of letters, a slash before letters.
fn sound_signs(text: &str) -> bool {
    let chars: Vec<char> = text.chars().collect();
    let letter = |at: Option<usize>| {
        at.and_then(|at| chars.get(at))
            .is_some_and(|c| c.is_alphabetic())
    };
    let after_blanks = |at: usize| (at..chars.len()).find(|at| !chars[*at].is_whitespace());
    let before_blanks = |at: usize| (0..at).rev().find(|at| !chars[*at].is_whitespace());
    chars.iter().enumerate().all(|(at, &c)| match c {
        c if HARMLESS.contains(c) || ('\u{1f300}'..='\u{1faff}').contains(&c) => true,
        '²' | '³' => letter(at.checked_sub(1)),
        '^' => letter(at.checked_sub(1)) && matches!(chars.get(at + 1), Some('2' | '3')),
        '2' | '3' => {
            let power = at > 0 && chars[at - 1] == '^';
            let unit = at > 0 && letter(Some(at - 1)) && is_length(&chars[..at]);
            let last = !chars.get(at + 1).is_some_and(|c| c.is_alphanumeric());
            (power || unit) && last
        }
        '/' => letter(after_blanks(at + 1)),
        '-' | '‑' => {
            letter(before_blanks(at)) && letter(Some(at + 1)) || at == 0 && letter(Some(1))
        }
        '·' | '⋅' => letter(before_blanks(at)) && letter(after_blanks(at + 1)),
        c => c.is_whitespace() || c.is_alphabetic() && !c.is_numeric(),
    })
}

/// Whether the letters at the end are a unit of length, which is raised without a sign: `cm2`.
fn is_length(chars: &[char]) -> bool {
    let start = chars
        .iter()
        .rposition(|c| !c.is_alphabetic())
        .map_or(0, |at| at + 1);
    let word: String = chars[start..].iter().collect();
    matches!(
        word.as_str(),
        "m" | "cm" | "mm" | "km" | "dm" | "ft" | "in" | "yd" | "mi"
    )
}
