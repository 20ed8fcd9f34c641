//! Blocks of a cache of keys and values: a sequence has as many as its tokens need, regardless of the others.

/// Tokens of a block.
pub const BLOCK: usize = 64;

/// Blocks of a sequence of at most `tokens` tokens. There is room for one token more: a row that has ended still writes
/// one after its last.
pub fn blocks_of(tokens: usize) -> usize {
    (tokens + 1).div_ceil(BLOCK)
}

/// Blocks for sequences that need `needs` blocks each, with `rows` sequences at a time: the average number in use,
/// where a sequence counts for as long as it runs, plus the largest. Never more than the `rows` largest need.
pub fn blocks_for(needs: &[usize], rows: usize) -> usize {
    let mut sorted = needs.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let most: usize = sorted.iter().take(rows).sum();
    let (sum, squares) = needs
        .iter()
        .fold((0, 0), |(sum, squares), &n| (sum + n, squares + n * n));
    let usual = (rows * squares).div_ceil(sum.max(1)) + sorted.first().copied().unwrap_or(0);
    most.min(usual)
}

/// Which blocks are free, and which each row has.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<i32>,
    blocks: Vec<Vec<i32>>,
}

impl Pool {
    pub fn new(rows: usize, blocks: usize) -> Self {
        Pool {
            free: (0..blocks as i32).rev().collect(),
            blocks: vec![Vec::new(); rows],
        }
    }

    /// Gives a row without blocks `count` of them; returns false, and gives none, if too few are free.
    pub fn take(&mut self, row: usize, count: usize) -> bool {
        debug_assert!(self.blocks[row].is_empty(), "row {row} already has blocks");
        let Some(left) = self.free.len().checked_sub(count) else {
            return false;
        };
        self.blocks[row] = self.free.drain(left..).rev().collect();
        true
    }

    /// Frees the blocks of a row.
    pub fn release(&mut self, row: usize) {
        self.free.extend(self.blocks[row].drain(..).rev());
    }

    /// Renumbers rows: the first are those of `kept`, in this order; all others have no blocks.
    pub fn keep(&mut self, kept: &[usize]) {
        let mut old = std::mem::take(&mut self.blocks);
        self.blocks = vec![Vec::new(); old.len()];
        for (row, &from) in kept.iter().enumerate() {
            self.blocks[row] = std::mem::take(&mut old[from]);
        }
        self.free.extend(old.into_iter().flatten());
    }

    /// The blocks of a row, in the order of its tokens.
    pub fn row_blocks(&self, row: usize) -> &[i32] {
        &self.blocks[row]
    }

    /// The position of a row's token among the tokens of all blocks.
    pub fn slot(&self, row: usize, token: usize) -> i32 {
        self.blocks[row][token / BLOCK] * BLOCK as i32 + (token % BLOCK) as i32
    }

    /// The blocks of all rows, each padded with 0 to `width`.
    pub fn table(&self, width: usize) -> Vec<i32> {
        let padded = |row: &Vec<i32>| {
            let mut row = row.clone();
            row.resize(width, 0);
            row
        };
        self.blocks.iter().flat_map(padded).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_room_for_one_more_token() {
        assert_eq!([0, 1, 63, 64, 127].map(blocks_of), [1, 1, 1, 2, 2]);
    }

    #[test]
    fn memory_follows_what_sequences_need() {
        // Equal needs: exactly what they need.
        assert_eq!(blocks_for(&[5; 8], 8), 40);
        assert_eq!(blocks_for(&[5; 100], 8), 40);
        // All at once: the sum of their needs.
        assert_eq!(blocks_for(&[1, 2, 3, 24], 4), 30);
        // One long and many short: never more than the largest that can run together.
        assert_eq!(blocks_for(&[vec![24], vec![1; 999]].concat(), 4), 27);
        // Eight long among many short: 16 (8 · 24² + 992) / (8 · 24 + 992) and the largest, not eight long and eight short.
        assert_eq!(blocks_for(&[vec![24; 8], vec![1; 992]].concat(), 16), 100);
        assert_eq!(blocks_for(&[], 4), 0);
    }

    #[test]
    fn the_largest_always_fits() {
        for rows in [1, 3, 16] {
            for needs in [vec![7], vec![1, 30, 2], (1..40).collect()] {
                let largest = needs.iter().copied().max().unwrap();
                assert!(Pool::new(rows, blocks_for(&needs, rows)).take(0, largest));
            }
        }
    }

    #[test]
    fn blocks_have_one_owner() {
        let mut pool = Pool::new(3, 6);
        assert!(pool.take(0, 2) && pool.take(1, 3));
        assert!(!pool.take(2, 2), "only one is left");
        assert_eq!(pool.table(4), [0, 1, 0, 0, 2, 3, 4, 0, 0, 0, 0, 0]);
        assert_eq!(
            [pool.slot(1, 0), pool.slot(1, 63), pool.slot(1, 130)],
            [128, 191, 258]
        );
        pool.release(0);
        assert!(pool.take(2, 3));
        let mut all = [pool.row_blocks(1), pool.row_blocks(2)].concat();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn rows_that_move_keep_their_blocks() {
        let mut pool = Pool::new(4, 8);
        for row in 0..4 {
            assert!(pool.take(row, 2));
        }
        pool.keep(&[3, 1]);
        assert_eq!(pool.table(2), [6, 7, 2, 3, 0, 0, 0, 0]);
        assert!(pool.take(2, 4), "the blocks of the others are free");
        assert!(!pool.take(3, 1));
    }
}
