//! Rows of one step: the known identities, in declared order.

use std::collections::HashMap;
use std::ops::Range;

use arrow_array::UInt32Array;
use verl_plan::schedule::wiring::Hop;

/// Rows of one kind in one step. Known rows are a prefix of all rows; positions never change.
#[derive(Debug, Default)]
pub(crate) struct TableState {
    ids: Vec<u64>,
    /// Position of each identity; built when first needed.
    index: HashMap<u64, u32>,
    /// Identities are not strictly increasing, so only the index can detect repeats.
    shuffled: bool,
    /// End position of each wave whose rows are all known; its groups are complete as well.
    pub ends: Vec<usize>,
    /// Number of rows, once no more can arrive.
    pub total: Option<usize>,
    /// For a filter's table: position in the parent of each row.
    pub kept: Vec<u32>,
}

impl TableState {
    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Appends rows; returns the first identity that is already in the table.
    pub(crate) fn extend(&mut self, ids: &[u64]) -> Option<u64> {
        let rises = |pair: &[u64]| pair[0] < pair[1];
        let joins = self
            .ids
            .last()
            .zip(ids.first())
            .is_none_or(|(last, first)| last < first);
        if !self.shuffled && joins && ids.windows(2).all(rises) {
            self.ids.extend_from_slice(ids);
            return None;
        }
        self.shuffled = true;
        self.ensure_index();
        for id in ids {
            if self.index.insert(*id, self.ids.len() as u32).is_some() {
                return Some(*id);
            }
            self.ids.push(*id);
        }
        None
    }

    fn ensure_index(&mut self) {
        if self.index.len() != self.ids.len() {
            self.index = self
                .ids
                .iter()
                .enumerate()
                .map(|(at, id)| (*id, at as u32))
                .collect();
        }
    }

    /// Positions of `ids`, which probably start at `guess`. The error is the first identity that is not in `within`.
    pub(crate) fn positions(
        &mut self,
        ids: &[u64],
        guess: usize,
        within: &Range<usize>,
    ) -> Result<Vec<u32>, u64> {
        let end = guess + ids.len();
        if end <= within.end && self.ids.get(guess..end) == Some(ids) {
            return Ok((guess as u32..end as u32).collect());
        }
        self.ensure_index();
        ids.iter()
            .map(|id| match self.index.get(id) {
                Some(at) if within.contains(&(*at as usize)) => Ok(*at),
                _ => Err(*id),
            })
            .collect()
    }
}

/// Rows of an ancestor's table, each once and in order; if descendants share an ancestor, `pick` maps each row to it.
#[derive(Debug, PartialEq)]
pub(crate) struct Ancestors {
    pub rows: AncestorRows,
    pub pick: Option<UInt32Array>,
}

/// Positions in a table, in increasing order.
#[derive(Debug, PartialEq)]
pub(crate) enum AncestorRows {
    Span(Range<usize>),
    Some(Vec<usize>),
}

/// The row in the ancestor's table that `row` descends from.
pub(crate) fn up(tables: &[TableState], path: &[Hop], row: usize) -> usize {
    path.iter().fold(row, |row, hop| match hop {
        Hop::Expand(n) => row / n,
        Hop::Filter(table) => tables[*table].kept[row] as usize,
    })
}

/// The rows in the ancestor's table that `rows` descend from.
pub(crate) fn up_range(tables: &[TableState], path: &[Hop], rows: &Range<usize>) -> Ancestors {
    if path.is_empty() {
        return Ancestors {
            rows: AncestorRows::Span(rows.clone()),
            pick: None,
        };
    }
    let mut distinct: Vec<usize> = Vec::new();
    let mut pick = Vec::with_capacity(rows.len());
    for row in rows.clone() {
        let ancestor = up(tables, path, row);
        if distinct.last() != Some(&ancestor) {
            distinct.push(ancestor);
        }
        pick.push(distinct.len() as u32 - 1);
    }
    let repeats = distinct.len() < rows.len();
    Ancestors {
        rows: AncestorRows::Some(distinct),
        pick: repeats.then(|| UInt32Array::from(pick)),
    }
}

/// The known descendants of `rows` of the ancestor.
pub(crate) fn down_range(tables: &[TableState], path: &[Hop], rows: &Range<usize>) -> Range<usize> {
    path.iter().rev().fold(rows.clone(), |rows, hop| match hop {
        Hop::Expand(n) => rows.start * n..rows.end * n,
        Hop::Filter(table) => {
            let kept = &tables[*table].kept;
            let below = |limit: usize| kept.partition_point(|at| (*at as usize) < limit);
            below(rows.start)..below(rows.end)
        }
    })
}

/// Groups adjacent positions into ranges.
pub(crate) fn runs(positions: &[u32]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for at in positions {
        let at = *at as usize;
        match runs.last_mut() {
            Some(run) if run.end == at => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Vec<TableState> {
        let mut rows = TableState::default();
        assert_eq!(rows.extend(&[10, 20, 30, 40]), None);
        let mut filtered = TableState {
            kept: vec![1, 3],
            ..TableState::default()
        };
        filtered.extend(&[20, 40]);
        vec![rows, filtered]
    }

    #[test]
    fn rows_map_up_and_down() {
        let tables = tables();
        let path = [Hop::Expand(2), Hop::Filter(1)];
        assert_eq!(
            (0..4).map(|r| up(&tables, &path, r)).collect::<Vec<_>>(),
            vec![1, 1, 3, 3]
        );
        assert_eq!(down_range(&tables, &path, &(3..4)), 2..4);
        assert_eq!(down_range(&tables, &path, &(0..1)), 0..0);
        let ancestors = up_range(&tables, &path, &(0..3));
        assert_eq!(ancestors.rows, AncestorRows::Some(vec![1, 3]));
        assert_eq!(
            ancestors.pick.map(|p| p.values().to_vec()),
            Some(vec![0, 0, 1])
        );
        assert_eq!(up_range(&tables, &path, &(1..3)).pick, None);
    }

    #[test]
    fn foreign_and_repeated_rows_are_detected() {
        let mut table = tables().remove(0);
        assert_eq!(table.positions(&[20, 30], 1, &(0..4)), Ok(vec![1, 2]));
        assert_eq!(table.positions(&[40, 10], 0, &(0..4)), Ok(vec![3, 0]));
        assert_eq!(table.positions(&[40, 10], 0, &(0..3)), Err(40));
        assert_eq!(table.positions(&[50], 0, &(0..4)), Err(50));
        assert_eq!(table.extend(&[50, 20]), Some(20));
        assert_eq!(runs(&[0, 1, 3, 2, 3]), vec![0..2, 3..4, 2..4]);
    }
}
