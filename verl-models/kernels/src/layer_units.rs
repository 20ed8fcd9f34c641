//! How the kernel of all layers of a decoding step (`cuda/decode_layers.cu`) divides a layer among its blocks.
//!
//! Only the arithmetic, apart from the launches, so that it can be tested without a GPU.

use super::Heads;

/// Most rows of a step that one kernel supports.
pub(crate) const MAX_ROWS: usize = 128;
/// Widest residual stream whose rows fit in the registers of the kernel's threads.
const MAX_WIDTH: usize = 8192;
/// Terms that are multiplied at once: pieces of a sum are whole chunks.
const CHUNK: usize = 128;
/// Tiles of columns are multiples of this.
const STEP: usize = 16;
/// Widest tile of columns.
const MAX_COLUMNS: usize = 128;
/// Most pieces of the sums of queries, keys, values and outputs; the reader adds them up.
const MAX_PIECES: usize = 4;
/// Most pieces of the long sums of the MLP's second product.
const MAX_PIECES_DOWN: usize = 9;
/// Most groups that share the tokens of a row.
const MAX_PARTS: usize = 8;

/// How a product is divided: a unit is a tile of columns and a piece of the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Units {
    /// Columns of a tile.
    pub tile: usize,
    /// Pieces of the sum.
    pub pieces: usize,
}

impl Units {
    /// Blocks that have a unit of `columns` columns. A pair of blocks has two neighbouring tiles of a piece, so the
    /// number of tiles is even.
    fn blocks(self, columns: usize) -> usize {
        columns.div_ceil(self.tile).next_multiple_of(2) * self.pieces
    }
}

/// The limits for which a layer's products are divided.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Rows of a tile of activations.
    rows: usize,
    /// Blocks that run at once.
    blocks: usize,
}

impl Limits {
    /// The units that fit and load the least into a block's shared memory; among equals those with the fewest pieces.
    /// `None` if no tile is wide enough.
    fn divide(self, columns: usize, terms: usize, most_pieces: usize) -> Option<Units> {
        let chunks = terms.div_ceil(CHUNK);
        let tiles = (STEP..=MAX_COLUMNS).step_by(STEP);
        let units = tiles.flat_map(|tile| {
            let pieces = 1..=most_pieces.min(chunks);
            pieces.map(move |pieces| Units { tile, pieces })
        });
        units
            .filter(|units| units.blocks(columns) <= self.blocks)
            .min_by_key(|units| {
                let brought = chunks.div_ceil(units.pieces) * (self.rows + units.tile);
                (brought, units.pieces)
            })
    }
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerSizes {
    /// Width of the residual stream.
    pub width: usize,
    /// Inner width of the MLP.
    pub inner: usize,
    /// Heads of the attention.
    pub heads: Heads,
}

impl LayerSizes {
    /// Whether copies of 16 bytes and matrix instructions support rows of these sizes.
    fn are_supported(&self) -> bool {
        let Heads { dim, .. } = self.heads;
        let widths = [self.width, self.inner];
        widths.iter().all(|width| width.is_multiple_of(8))
            && self.width <= MAX_WIDTH
            && dim.is_multiple_of(16)
            && dim <= 128
    }
}

/// How the products of a layer are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerUnits {
    /// Rows of a tile of activations: 16, 32, 64 or 128.
    pub rows: usize,
    /// Queries, keys and values.
    pub qkv: Units,
    /// The projection of the mixed values.
    pub output: Units,
    /// Gates and ups, each half of a tile.
    pub mlp: Units,
    /// The projection back to the residual stream.
    pub down: Units,
}

impl LayerUnits {
    /// The division for this many rows and blocks; `None` if the kernel does not support the layer.
    pub fn of(sizes: &LayerSizes, rows: usize, blocks: usize) -> Option<Self> {
        if !sizes.are_supported() || rows == 0 || rows > MAX_ROWS {
            return None;
        }
        let limits = Limits {
            rows: rows.next_power_of_two().max(16),
            blocks,
        };
        let (width, inner) = (sizes.width, sizes.inner);
        Some(LayerUnits {
            rows: limits.rows,
            qkv: limits.divide(sizes.heads.joined_width(), width, MAX_PIECES)?,
            output: limits.divide(width, sizes.heads.query_width(), MAX_PIECES)?,
            mlp: limits.divide(2 * inner, width, 1)?,
            down: limits.divide(width, inner, MAX_PIECES_DOWN)?,
        })
    }

    /// Numbers of all pieces of a row, in the product with the most.
    pub fn pieces(&self, sizes: &LayerSizes) -> usize {
        let most = (self.output.pieces).max(self.down.pieces) * sizes.width;
        most.max(self.qkv.pieces * sizes.heads.joined_width())
    }
}

/// Most groups that share the tokens of a row, for `tiles` pairs of a row and a tile of heads: twice as many groups as
/// blocks in total.
pub(crate) fn attention_parts(tiles: usize, blocks: usize) -> usize {
    (2 * blocks / tiles).clamp(1, MAX_PARTS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HALF_BILLION: LayerSizes = sizes([896, 4864], [14, 2, 64]);
    const SMOL: LayerSizes = sizes([576, 1536], [9, 3, 64]);
    const TINY: LayerSizes = sizes([64, 128], [4, 2, 16]);

    const fn sizes([width, inner]: [usize; 2], [query, key_value, dim]: [usize; 3]) -> LayerSizes {
        let heads = Heads {
            query,
            key_value,
            dim,
        };
        LayerSizes {
            width,
            inner,
            heads,
        }
    }

    /// Tile and pieces of qkv, output, mlp and down, with the blocks of an H200.
    #[track_caller]
    fn check(sizes: &LayerSizes, rows: usize, expected: [(usize, usize); 4]) {
        let found = LayerUnits::of(sizes, rows, 132).unwrap();
        let products = [found.qkv, found.output, found.mlp, found.down];
        assert_eq!(products.map(|units| (units.tile, units.pieces)), expected);
    }

    #[test]
    fn models_are_divided() {
        for rows in [16, 128] {
            check(&HALF_BILLION, rows, [(48, 4), (32, 4), (80, 1), (64, 8)]);
            check(&TINY, rows, [(16, 1); 4]);
        }
        check(&SMOL, 16, [(16, 2), (16, 3), (32, 1), (32, 6)]);
        check(&SMOL, 128, [(32, 3), (16, 3), (32, 1), (32, 6)]);
    }

    #[test]
    fn rows_fit_in_tiles_of_activations() {
        for (rows, tile_rows) in [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128)] {
            assert_eq!(LayerUnits::of(&SMOL, rows, 132).unwrap().rows, tile_rows);
        }
        assert_eq!(LayerUnits::of(&SMOL, 0, 132), None);
        assert_eq!(LayerUnits::of(&SMOL, 129, 132), None);
    }

    #[test]
    fn unsupported_layers_are_not_divided() {
        for other in [
            sizes([1536, 8960], [12, 2, 128]), // more gates and ups than blocks have columns
            sizes([8320, 128], [4, 2, 16]),    // too wide
            sizes([64, 132], [4, 2, 16]),
            sizes([64, 128], [4, 2, 24]),
            sizes([64, 128], [4, 2, 256]),
        ] {
            assert_eq!(LayerUnits::of(&other, 16, 132), None, "{other:?}");
        }
    }

    #[test]
    fn the_largest_product_sets_the_room_for_pieces() {
        let units = LayerUnits::of(&HALF_BILLION, 128, 132).unwrap();
        assert_eq!(units.pieces(&HALF_BILLION), 8 * 896);
        let units = LayerUnits::of(&TINY, 16, 132).unwrap();
        assert_eq!(units.pieces(&TINY), 128);
    }

    #[test]
    fn groups_share_rows_while_blocks_are_idle() {
        for (tiles, parts) in [(2, 8), (32, 8), (64, 4), (256, 1), (1024, 1)] {
            assert_eq!(attention_parts(tiles, 132), parts);
        }
    }

    proptest! {
        #[test]
        fn units_cover_a_product_and_fit(
            columns in 1..1500_usize,
            terms in 1..1500_usize,
            most_pieces in 1..10_usize,
            rows in prop::sample::select(vec![16_usize, 32, 64, 128]),
            blocks in 1..80_usize,
        ) {
            let (columns, terms, blocks) = (8 * columns, 8 * terms, 2 * blocks);
            let limits = Limits { rows, blocks };
            let chunks = terms.div_ceil(CHUNK);
            let Some(units) = limits.divide(columns, terms, most_pieces) else {
                let widest = Units { tile: MAX_COLUMNS, pieces: 1 };
                prop_assert!(widest.blocks(columns) > blocks);
                return Ok(());
            };
            let Units { tile, pieces } = units;
            prop_assert!(tile.is_multiple_of(16) && tile <= 128);
            prop_assert!((1..=most_pieces).contains(&pieces));
            // As the kernel finds a unit's columns and chunks.
            let pairs = columns.div_ceil(tile).div_ceil(2);
            prop_assert!(2 * pairs * pieces <= blocks);
            let (mut tiles, mut next) = (vec![0; 2 * pairs], vec![0; 2 * pairs]);
            for pair in 0..pairs * pieces {
                let piece = pair / pairs;
                let [begin, end] = [piece, piece + 1].map(|at| at * chunks / pieces);
                prop_assert!(begin < end);
                for rank in 0..2 {
                    let at = pair % pairs * 2 + rank;
                    prop_assert_eq!(next[at], begin);
                    next[at] = end;
                    tiles[at] += 1;
                }
            }
            prop_assert!(next.iter().all(|&end| end == chunks));
            prop_assert!(tiles.iter().all(|&count| count == pieces));
            prop_assert!(tiles.len() * tile >= columns);
        }
    }
}
