//! How products are divided: every choice that was made by measuring, in one place, except for the kernel of all layers
//! (`layer_units.rs`).
//!
//! `scripts/kernels/decode.py step` times a complete step with these and with other divisions.

use super::Into;

/// Multiprocessors of a Hopper GPU.
pub(super) const PROCESSORS: usize = 132;
/// Blocks that run at once.
pub(super) const FULL: usize = 3 * PROCESSORS;
/// Most rows of a product that `gemm_skinny.cu` supports.
pub(super) const SKINNY_ROWS: usize = 16;
/// Rows from which `gemm_dyn.cu` is faster, outside of decoding.
pub(super) const DEEP_ROWS: usize = 256;
/// The rows of a matrix that is stored next to others are a multiple of the widest tile that must not cross into the
/// next.
pub(super) const JOINT: usize = 128;

/// How `gemm_skinny.cu` divides a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Skinny {
    /// Tiles of 16 rows of the weight in a block.
    pub tiles: usize,
    /// Warps that share a tile's sum.
    pub warps: usize,
    /// Loads of a warp in flight.
    pub ahead: usize,
    /// Blocks of a cluster that share a sum.
    pub sharing: usize,
    pub blocks_per_processor: usize,
    /// Most blocks; without a limit each takes one group of tiles.
    pub most: Option<usize>,
}

impl Skinny {
    /// For a weight of about this size; `None` if its parts do not fit.
    pub fn of(rows: usize, [n, k]: [usize; 2], into: Into) -> Option<Self> {
        if rows > SKINNY_ROWS || into == Into::Swiglu && !n.is_multiple_of(16) {
            return None;
        }
        let skinny = |tiles, warps, ahead, sharing, blocks_per_processor, most| Skinny {
            tiles,
            warps,
            ahead,
            sharing,
            blocks_per_processor,
            most,
        };
        let found = if n >= 1 << 16 {
            skinny(2, 4, 4, 1, 2, Some(2 * PROCESSORS))
        } else if n >= 4096 || into == Into::Swiglu {
            skinny(5, 4, 7, 1, 1, None)
        } else if k > 2048 {
            skinny(1, 5, 4, 8, 4, None)
        } else {
            skinny(1, 7, 4, 1, 1, None)
        };
        // Rows of X are staged in shared memory if a block has several tiles.
        let slices = k.div_ceil(32).div_ceil(found.sharing);
        let staged = if found.tiles > 1 {
            SKINNY_ROWS * (slices | 1) * 64
        } else {
            16
        };
        let partial = (found.warps - 1) * found.tiles * (SKINNY_ROWS / 8) * 512;
        (staged + partial <= 44 << 10).then_some(found)
    }
}

/// How `gemm.cu` divides a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub rows: usize,
    pub columns: usize,
    /// Terms of a stage, and number of stages.
    pub terms: usize,
    pub stages: usize,
    /// Blocks of a cluster that share a sum.
    pub sharing: usize,
    pub blocks_per_processor: usize,
}

impl Tile {
    /// For the rows of a decoding step, within 48 KiB.
    pub fn of_few(m: usize, [n, k]: [usize; 2], swiglu: bool) -> Self {
        let mut tile = if m <= 64 { FEW } else { SOME };
        let columns = if swiglu {
            tile.columns / 2
        } else {
            tile.columns
        };
        let blocks = m.div_ceil(tile.rows) * n.div_ceil(tile.columns);
        let sharing = |share: &usize| {
            blocks * share <= 2 * PROCESSORS
                && columns.is_multiple_of(8 * share)
                && k / share >= 128
        };
        tile.sharing = [8, 4, 2].into_iter().find(sharing).unwrap_or(1);
        tile
    }

    /// For the rows of a decoding step, with the ring depths that measured best.
    pub fn of_some(m: usize, [n, k]: [usize; 2], swiglu: bool) -> Self {
        let tile = |rows, columns, stages, sharing, blocks_per_processor| Tile {
            rows,
            columns,
            terms: 64,
            stages,
            sharing,
            blocks_per_processor,
        };
        // Half of the columns of gates and ups are ups: short sums are not shared.
        let (wide, long) = (swiglu || n >= 4096, k > 2048);
        let share = |most: usize| if k >= 512 { most } else { 1 };
        match m {
            0..=64 if wide => tile(64, 64, 6, 1, 2),
            0..=64 if long => tile(64, 64, 10, 8, 1),
            0..=64 => tile(64, 32, 4, share(4), 1),
            65..=128 if swiglu => tile(64, 64, 4, 1, 3),
            65..=128 if wide => tile(128, 64, 4, 1, 2),
            65..=128 if long => tile(128, 64, 8, 8, 1),
            65..=128 => tile(64, 32, 7, share(2), 2),
            _ => {
                let tiles = m.div_ceil(128) * n.div_ceil(64);
                let whole = wide || 2 * tiles > PROCESSORS;
                tile(128, 64, 4, if whole { 1 } else { share(2) }, 2)
            }
        }
    }
}

/// For many rows.
pub(super) const WIDE: Tile = Tile {
    rows: 128,
    columns: 128,
    terms: 32,
    stages: 2,
    sharing: 1,
    blocks_per_processor: 3,
};

/// For up to 64 rows.
const FEW: Tile = Tile {
    rows: 64,
    columns: 64,
    terms: 64,
    stages: 2,
    sharing: 1,
    blocks_per_processor: 4,
};

/// For up to some hundred rows.
const SOME: Tile = Tile {
    rows: 128,
    columns: 64,
    terms: 32,
    stages: 3,
    sharing: 1,
    blocks_per_processor: 4,
};

/// Whether `gemm_dyn.cu` should compute a product of a decoding step.
pub(super) fn is_deep([m, n, k]: [usize; 3]) -> bool {
    match m {
        0..=64 => false,
        65..=128 => n >= 1 << 16,
        129..=256 => true,
        _ => n >= 4096 || k > 2048,
    }
}

/// How `gemm_dyn.cu` divides a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deep {
    /// Columns of a tile.
    pub columns: usize,
    /// Blocks of a cluster that share a sum.
    pub sharing: usize,
    /// Terms of a piece of the sum; pieces are added up by another kernel.
    pub part: usize,
}

impl Deep {
    /// The width of tiles that wastes least of the last wave; with `apart` tiles do not cross into another matrix.
    fn columns([m, n]: [usize; 2], swiglu: bool, apart: bool) -> usize {
        if apart && !swiglu {
            return JOINT;
        }
        let waves = |columns: usize| (m.div_ceil(128) * n.div_ceil(columns)).div_ceil(PROCESSORS);
        let few = (!swiglu && n.is_multiple_of(224)).then_some(224);
        let sizes = [256, 192, 128].into_iter().chain(few);
        sizes
            .min_by_key(|&columns| waves(columns) * (columns + 32))
            .unwrap_or(256)
    }

    /// Unsplit sums: the bits of a row do not depend on the number of rows.
    pub fn whole([m, n, k]: [usize; 3], swiglu: bool, apart: bool) -> Self {
        Deep {
            columns: Deep::columns([m, n], swiglu, apart),
            sharing: 1,
            part: k.next_multiple_of(64),
        }
    }

    /// Sums in pieces, if tiles leave most of the GPU idle and each piece is long.
    pub fn in_pieces([m, n, k]: [usize; 3]) -> Self {
        let columns = Deep::columns([m, n], false, false);
        let tiles = m.div_ceil(128) * n.div_ceil(columns);
        let pieces = (PROCESSORS / tiles).clamp(1, (k / 512).max(1));
        Deep {
            columns,
            sharing: 1,
            part: k.div_ceil(pieces).next_multiple_of(64),
        }
    }

    /// For a decoding step: clusters share the sums of a product with few tiles.
    pub fn of_step([m, n, k]: [usize; 3], swiglu: bool, apart: bool) -> Self {
        let tiles = m.div_ceil(128) * n.div_ceil(128);
        let sharing = |share: &usize| tiles * share <= PROCESSORS && k / share >= 448;
        let found = [8, 4, 2].into_iter().find(sharing).unwrap_or(1);
        if swiglu || found == 1 && m > 128 {
            return Deep::whole([m, n, k], swiglu, apart);
        }
        Deep {
            columns: 128,
            sharing: found,
            part: k.next_multiple_of(64),
        }
    }
}
