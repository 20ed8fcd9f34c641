//! Products of f32 matrices on the CPU.
//!
//! c[m, n] = Σ_k a[m, k] · b[k, n]: each element adds its terms in ascending order of k to one sum, and a product is
//! fused with its addition. So the bits of an element depend only on its row and its column: not on the width of the
//! registers, the sizes of the caches, the number of threads, or the rows and columns beside it. The rollout's products
//! with packed weights add in the same order and have the same bits.
//!
//! Columns of `b` are packed into panels of two registers. A tile of rows of `a` is multiplied with a panel while all
//! its sums stay in registers: 12 × 32 with 32 registers of 16 numbers, 6 × 16 with 16 registers of 8.

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use crate::lanes::{Kernel, Lanes, Row, TRANSPOSE_SIZE, run};
use crate::unset::{self, Unset};
use crate::vector::LANES;

/// Most terms that are added for one tile before the next one, so that their part of a panel stays in a near cache.
const DEPTH: usize = 384;
/// Columns of a panel.
const PANEL: usize = 2 * LANES;
/// Rows of a tile with wide registers.
const WIDE_ROWS: usize = 12;
/// Rows of a tile with narrow registers.
const NARROW_ROWS: usize = 6;
/// Products with fewer terms than this run on the calling thread: distributing them would cost more.
const SINGLE_THREAD_TERMS: usize = 1 << 18;
/// Right operands of up to this many numbers are packed once for all rows.
const PACKED_ONCE: usize = 1 << 20;
/// Fewest rows of a task in that case: each task reads all panels.
const LEAST_ROWS: usize = 4 * WIDE_ROWS;
/// Most rows of a task in that case: [`DEPTH`] terms of them stay in the second-level cache while panels stream by.
const TASK_ROWS: usize = 192;
/// Products with fewer rows pack the left operand into the panel instead of the right one, which is read once.
const FEW_ROWS: usize = 16;

/// One row of a panel, aligned to a cache line: a register that crosses two lines takes two loads.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct PanelRow([Row; 2]);

impl PanelRow {
    const ZERO: PanelRow = PanelRow([[0.0; LANES]; 2]);
}

/// A row-major matrix, or the transpose of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    is_transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `values`: `[rows, columns]`.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        debug_assert_eq!(values.len(), rows * columns);
        Matrix {
            values,
            rows,
            columns,
            is_transposed: false,
        }
    }

    /// Its number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Its number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// The same values with rows and columns exchanged; nothing is copied.
    pub(crate) fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            is_transposed: !self.is_transposed,
            ..self
        }
    }
}

/// Initial value of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// 0; the output's contents are ignored.
    Zero,
    /// The output's contents.
    Output,
}

/// `a · b`, row-major.
///
/// # Shapes
/// `a`: `[M, K]`; `b`: `[K, N]`; result: `[M, N]`
///
/// # Panics
/// If the columns of `a` are not the rows of `b`, which is a caller's bug.
pub(crate) fn product(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    #[expect(unsafe_code, reason = "`multiply` from zero writes every element")]
    unsafe {
        unset::made(a.rows * b.columns, |out| multiply(a, b, Start::Zero, out))
    }
}

/// Writes `a · b` into `out`, or adds it: then each sum continues from the value in `out`.
///
/// # Shapes
/// `a`: `[M, K]`; `b`: `[K, N]`; `out`: `[M, N]`
///
/// # Panics
/// If sizes do not match, which is a caller's bug.
pub(crate) fn product_into(a: Matrix<'_>, b: Matrix<'_>, start: Start, out: &mut [f32]) {
    multiply(a, b, start, unset::of(out));
}

/// Writes every element of `out`, unless sums start from its contents.
fn multiply(a: Matrix<'_>, b: Matrix<'_>, start: Start, out: &mut [Unset]) {
    assert_eq!(a.columns, b.rows, "operands differ in their inner size");
    let (m, n) = (a.rows, b.columns);
    assert_eq!(out.len(), m * n, "the output has the wrong size");
    if out.is_empty() {
        return;
    }
    if a.columns == 0 {
        if start == Start::Zero {
            out.fill(Unset::new(0.0));
        }
        return;
    }
    if m < FEW_ROWS && n >= 2 * FEW_ROWS && b.is_transposed && start == Start::Zero {
        let columns = product(b.transposed(), a.transposed());
        for (row, out) in out.chunks_exact_mut(n).enumerate() {
            for (column, out) in out.iter_mut().enumerate() {
                out.write(columns[column * m + row]);
            }
        }
        return;
    }
    let terms = m.saturating_mul(n).saturating_mul(a.columns);
    let pieces = 4 * rayon::current_num_threads();
    if terms < SINGLE_THREAD_TERMS {
        by_rows(a, Right::Plain(b), m, start, out);
    } else if b.values.len() <= PACKED_ONCE && m >= pieces * LEAST_ROWS {
        let rows = m
            .div_ceil(pieces)
            .next_multiple_of(WIDE_ROWS)
            .min(TASK_ROWS);
        let panels = panels(b);
        by_rows(a, Right::Packed(&panels), rows, start, out);
        PANELS.set(panels);
    } else {
        let columns = n.div_ceil(PANEL).div_ceil(pieces) * PANEL;
        by_columns(a, b, columns, start, out);
    }
}

/// The right operand of a product.
#[derive(Clone, Copy)]
enum Right<'a> {
    /// Packed by each task for itself.
    Plain(Matrix<'a>),
    /// Packed: consecutive panels, `[N/PANEL, K]`.
    Packed(&'a [PanelRow]),
}

/// The product in tasks of `rows` rows.
fn by_rows(a: Matrix<'_>, b: Right<'_>, rows: usize, start: Start, out: &mut [Unset]) {
    let n = out.len() / a.rows;
    let task = |(index, out): (usize, &mut [Unset])| {
        let mut out: Vec<&mut [Unset]> = out.chunks_exact_mut(n).collect();
        run(Task {
            a,
            first_row: index * rows,
            b,
            first_column: 0,
            start,
            out: &mut out,
        });
    };
    if rows >= a.rows {
        task((0, out));
    } else {
        out.par_chunks_mut(rows * n).enumerate().for_each(task);
    }
}

/// The product in tasks of `columns` columns, a multiple of [`PANEL`].
fn by_columns(a: Matrix<'_>, b: Matrix<'_>, columns: usize, start: Start, out: &mut [Unset]) {
    let n = b.columns;
    let mut tasks: Vec<Vec<&mut [Unset]>> = Vec::new();
    tasks.resize_with(n.div_ceil(columns), || Vec::with_capacity(a.rows));
    for row in out.chunks_exact_mut(n) {
        for (task, piece) in tasks.iter_mut().zip(row.chunks_mut(columns)) {
            task.push(piece);
        }
    }
    tasks
        .into_par_iter()
        .enumerate()
        .for_each(|(index, mut out)| {
            run(Task {
                a,
                first_row: 0,
                b: Right::Plain(b),
                first_column: index * columns,
                start,
                out: &mut out,
            });
        });
}

thread_local! {
    /// Memory of the panels of an earlier product, [`PACKED_ONCE`] numbers or slightly more.
    static PANELS: Cell<Vec<PanelRow>> = const { Cell::new(Vec::new()) };
}

/// Packs all panels of `b`.
fn panels(b: Matrix<'_>) -> Vec<PanelRow> {
    let mut panels = PANELS.take();
    panels.resize(b.columns.div_ceil(PANEL) * b.rows, PanelRow::ZERO);
    panels
        .par_chunks_mut(b.rows)
        .enumerate()
        .for_each(|(index, panel)| run(Packing { b, index, panel }));
    panels
}

/// Packs one panel of `b`.
struct Packing<'a> {
    b: Matrix<'a>,
    index: usize,
    panel: &'a mut [PanelRow],
}

impl Kernel for Packing<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        pack::<L>(self.b, 0, self.index * PANEL, self.panel);
    }
}

/// Packs the rows of `b` from `first_row` on, of a panel's columns; zeros past its last column.
#[inline(always)]
fn pack<L: Lanes>(b: Matrix<'_>, first_row: usize, first_column: usize, panel: &mut [PanelRow]) {
    let width = PANEL.min(b.columns - first_column);
    if b.is_transposed {
        let column =
            |lane: usize| &b.values[(first_column + lane) * b.rows + first_row..][..panel.len()];
        if width < PANEL {
            let columns: [&[f32]; PANEL] =
                std::array::from_fn(|lane| if lane < width { column(lane) } else { &[] });
            for (row, to) in panel.iter_mut().enumerate() {
                for (to, column) in to.0.as_flattened_mut().iter_mut().zip(columns) {
                    *to = column.get(row).copied().unwrap_or(0.0);
                }
            }
            return;
        }
        let columns: [&[f32]; PANEL] = std::array::from_fn(column);
        let (blocks, rest) = panel.as_chunks_mut::<TRANSPOSE_SIZE>();
        let whole = blocks.len() * TRANSPOSE_SIZE;
        for first in (0..PANEL).step_by(TRANSPOSE_SIZE) {
            let columns: [&[[f32; TRANSPOSE_SIZE]]; TRANSPOSE_SIZE] =
                std::array::from_fn(|lane| columns[first + lane].as_chunks().0);
            for (at, block) in blocks.iter_mut().enumerate() {
                let transposed = L::transpose(std::array::from_fn(|lane| &columns[lane][at]));
                for row in 0..TRANSPOSE_SIZE {
                    block[row].0.as_flattened_mut()[first..][..TRANSPOSE_SIZE]
                        .copy_from_slice(&transposed[row]);
                }
            }
        }
        for (row, to) in rest.iter_mut().enumerate() {
            for (to, column) in to.0.as_flattened_mut().iter_mut().zip(columns) {
                *to = column[whole + row];
            }
        }
    } else {
        let rows = panel.iter_mut().enumerate().map(|(row, to)| {
            let from = &b.values[(first_row + row) * b.columns + first_column..][..width];
            (to.0.as_flattened_mut(), from)
        });
        // Copies of a known length compile to register moves; others are calls.
        if width == PANEL {
            rows.for_each(|(to, from)| to[..PANEL].copy_from_slice(&from[..PANEL]));
        } else {
            for (to, from) in rows {
                to[..width].copy_from_slice(from);
                to[width..].fill(0.0);
            }
        }
    }
}

/// Some rows and columns of a product.
struct Task<'a, 'o> {
    a: Matrix<'a>,
    first_row: usize,
    b: Right<'a>,
    first_column: usize,
    start: Start,
    /// The task's columns of each of its rows.
    out: &'a mut [&'o mut [Unset]],
}

impl Kernel for Task<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        // Pieces of equal depth: a short piece would cost as much to start and finish.
        let depth = self.a.columns.div_ceil(self.a.columns.div_ceil(DEPTH));
        let mut own = match self.b {
            Right::Plain(_) => vec![PanelRow::ZERO; depth],
            Right::Packed(_) => Vec::new(),
        };
        let height = if L::ARE_WIDE { WIDE_ROWS } else { NARROW_ROWS };
        let mut tiles_of_a = Vec::new();
        for first_term in (0..self.a.columns).step_by(depth) {
            let depth = depth.min(self.a.columns - first_term);
            if self.a.is_transposed {
                let rows = self.first_row..self.first_row + self.out.len() / height * height;
                let terms = first_term..first_term + depth;
                if L::ARE_WIDE {
                    pack_left::<WIDE_ROWS>(self.a, rows, terms, &mut tiles_of_a);
                } else {
                    pack_left::<NARROW_ROWS>(self.a, rows, terms, &mut tiles_of_a);
                }
            }
            for column in (0..self.out[0].len()).step_by(PANEL) {
                let panel = match self.b {
                    Right::Packed(panels) => {
                        let panel = (self.first_column + column) / PANEL;
                        &panels[panel * self.a.columns + first_term..][..depth]
                    }
                    Right::Plain(b) => {
                        let panel = &mut own[..depth];
                        pack::<L>(b, first_term, self.first_column + column, panel);
                        &*panel
                    }
                };
                let left = Left {
                    a: self.a,
                    first_row: self.first_row,
                    first_term,
                    packed: &tiles_of_a,
                    goes_on: first_term > 0 || self.start == Start::Output,
                };
                if L::ARE_WIDE {
                    tiles::<L, WIDE_ROWS, 2>(left, panel, 0, self.out, column);
                } else {
                    tiles::<L, NARROW_ROWS, 1>(left, panel, 0, self.out, column);
                    tiles::<L, NARROW_ROWS, 1>(left, panel, 1, self.out, column + LANES);
                }
            }
        }
    }
}

/// Rows of the left operand from `first_row` on, terms from `first_term` on.
#[derive(Clone, Copy)]
struct Left<'a> {
    a: Matrix<'a>,
    first_row: usize,
    first_term: usize,
    /// Tiles of these rows and terms, see [`pack_left`]; empty if they are read from the operand.
    packed: &'a [f32],
    /// Whether sums continue from the output, which has been written before.
    goes_on: bool,
}

/// Packs consecutive tiles of `ROWS` rows of a transposed operand, each `[terms, ROWS]`: in such an operand the rows of
/// a tile are adjacent, but its terms are far apart.
#[inline(always)]
fn pack_left<const ROWS: usize>(
    a: Matrix<'_>,
    rows: Range<usize>,
    terms: Range<usize>,
    tiles: &mut Vec<f32>,
) {
    let depth = terms.len();
    tiles.resize(rows.len() * depth, 0.0);
    let tiles = tiles.as_chunks_mut::<ROWS>().0.chunks_exact_mut(depth);
    for (first_row, tile) in rows.step_by(ROWS).zip(tiles) {
        let from = &a.values[terms.start * a.rows + first_row..];
        for (to, from) in tile.iter_mut().zip(from.chunks(a.rows)) {
            to.copy_from_slice(&from[..ROWS]);
        }
    }
}

/// All rows of a task with `W` registers of a panel, from register `side` on; the results start at `column`.
#[inline(always)]
fn tiles<L: Lanes, const ROWS: usize, const W: usize>(
    left: Left<'_>,
    panel: &[PanelRow],
    side: usize,
    out: &mut [&mut [Unset]],
    column: usize,
) {
    if column >= out[0].len() {
        return;
    }
    let (height, tile_len) = (out.len() / ROWS * ROWS, ROWS * panel.len());
    let mut row = 0;
    while row < out.len() {
        let is_whole = row < height;
        let left = Left {
            first_row: left.first_row + row,
            packed: match is_whole && !left.packed.is_empty() {
                true => &left.packed[row / ROWS * tile_len..][..tile_len],
                false => &[],
            },
            ..left
        };
        let rest = &mut out[row..];
        row += match rest.len() {
            _ if is_whole => tile::<L, ROWS, W>(left, panel, side, rest, column),
            8.. => tile::<L, 8, W>(left, panel, side, rest, column),
            4.. => tile::<L, 4, W>(left, panel, side, rest, column),
            2.. => tile::<L, 2, W>(left, panel, side, rest, column),
            _ => tile::<L, 1, W>(left, panel, side, rest, column),
        };
    }
}

/// Computes a tile of the first `ROWS` rows of `out`; returns their number.
#[inline(always)]
fn tile<L: Lanes, const ROWS: usize, const W: usize>(
    left: Left<'_>,
    panel: &[PanelRow],
    side: usize,
    out: &mut [&mut [Unset]],
    column: usize,
) -> usize {
    match ROWS {
        12 => twelve_rows::<L, W>(left, panel, side, out, column),
        8 => eight_rows::<L, W>(left, panel, side, out, column),
        6 => six_rows::<L, W>(left, panel, side, out, column),
        4 => four_rows::<L, W>(left, panel, side, out, column),
        2 => two_rows::<L, W>(left, panel, side, out, column),
        _ => one_row::<L, W>(left, panel, side, out, column),
    }
    ROWS
}

/// Defines a function that adds up Σ_k a[row, k] panel[k] of some rows and writes it to `out` from `column` on.
///
/// Each sum is a separate variable: depending on the surrounding code, the compiler may keep an array of them in
/// memory, which halves the speed.
macro_rules! tile {
    ($name:ident, $rows:literal: $($row:literal $x:ident $y:ident),+) => {
        #[inline(always)]
        fn $name<L: Lanes, const W: usize>(
            left: Left<'_>,
            panel: &[PanelRow],
            side: usize,
            out: &mut [&mut [Unset]],
            column: usize,
        ) {
            let Some(out) = out.first_chunk_mut::<$rows>() else {
                return;
            };
            let width = (W * LANES).min(out[0].len() - column);
            $(let (mut $x, mut $y) = (L::splat(0.0), L::splat(0.0));)+
            if left.goes_on {
                $(($x, $y) = before::<L, W>(&out[$row][column..][..width]);)+
            }
            let Left { a, first_row, first_term, packed, .. } = left;
            if !packed.is_empty() {
                for (factors, values) in panel.iter().zip(packed.as_chunks::<$rows>().0) {
                    let (first, second) = (L::load(&factors.0[side]), L::load(&factors.0[1]));
                    $(
                        let value = L::splat(values[$row]);
                        $x = value.mul_add(first, $x);
                        if W == 2 {
                            $y = value.mul_add(second, $y);
                        }
                    )+
                }
            } else if a.is_transposed {
                let values = &a.values[first_term * a.rows + first_row..];
                for (term, factors) in panel.iter().enumerate() {
                    let values: &[f32] = &values[term * a.rows..][..$rows];
                    let (first, second) = (L::load(&factors.0[side]), L::load(&factors.0[1]));
                    $(
                        let value = L::splat(values[$row]);
                        $x = value.mul_add(first, $x);
                        if W == 2 {
                            $y = value.mul_add(second, $y);
                        }
                    )+
                }
            } else {
                let rows: [&[f32]; $rows] = std::array::from_fn(|row| {
                    &a.values[(first_row + row) * a.columns + first_term..][..panel.len()]
                });
                for (term, factors) in panel.iter().enumerate() {
                    let (first, second) = (L::load(&factors.0[side]), L::load(&factors.0[1]));
                    $(
                        let value = L::splat(rows[$row][term]);
                        $x = value.mul_add(first, $x);
                        if W == 2 {
                            $y = value.mul_add(second, $y);
                        }
                    )+
                }
            }
            $(after::<L, W>(($x, $y), &mut out[$row][column..][..width]);)+
        }
    };
}

tile!(twelve_rows, 12: 0 x0 y0, 1 x1 y1, 2 x2 y2, 3 x3 y3, 4 x4 y4, 5 x5 y5, 6 x6 y6, 7 x7 y7, 8 x8 y8, 9 x9 y9, 10 x10 y10, 11 x11 y11);
tile!(eight_rows, 8: 0 x0 y0, 1 x1 y1, 2 x2 y2, 3 x3 y3, 4 x4 y4, 5 x5 y5, 6 x6 y6, 7 x7 y7);
tile!(six_rows, 6: 0 x0 y0, 1 x1 y1, 2 x2 y2, 3 x3 y3, 4 x4 y4, 5 x5 y5);
tile!(four_rows, 4: 0 x0 y0, 1 x1 y1, 2 x2 y2, 3 x3 y3);
tile!(two_rows, 2: 0 x0 y0, 1 x1 y1);
tile!(one_row, 1: 0 x0 y0);

/// Sums that the preceding piece of terms has left in the output.
#[inline(always)]
fn before<L: Lanes, const W: usize>(out: &[Unset]) -> (L, L) {
    #[expect(unsafe_code, reason = "the preceding piece has written the output")]
    let out = unsafe { out.assume_init_ref() };
    let mut lanes = [[0.0; LANES]; 2];
    if out.len() == W * LANES {
        lanes.as_flattened_mut()[..W * LANES].copy_from_slice(&out[..W * LANES]);
    } else {
        lanes.as_flattened_mut()[..out.len()].copy_from_slice(out);
    }
    (L::load(&lanes[0]), L::load(&lanes[1]))
}

/// Writes sums to the output; lanes past its end are dropped.
#[inline(always)]
fn after<L: Lanes, const W: usize>(sums: (L, L), out: &mut [Unset]) {
    if out.len() == W * LANES {
        let to = out.as_chunks_mut::<LANES>().0;
        sums.0.write(&mut to[0]);
        if W == 2 {
            sums.1.write(&mut to[1]);
        }
    } else {
        let mut lanes = [[0.0; LANES]; 2];
        sums.0.store(&mut lanes[0]);
        sums.1.store(&mut lanes[1]);
        let width = out.len();
        out.write_copy_of_slice(&lanes.as_flattened()[..width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::Plain;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| (((i + seed) * 7919) % 1999) as f32 / 1000.0 - 1.0)
            .collect()
    }

    /// Sums in ascending order, fused.
    fn plain(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
        let element = |i: usize, j: usize| {
            (0..k).fold(0.0_f32, |sum, t| a[i * k + t].mul_add(b[t * n + j], sum))
        };
        (0..m * n).map(|at| element(at / n, at % n)).collect()
    }

    fn transpose(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns)
            .map(|at| x[at % rows * columns + at / rows])
            .collect()
    }

    /// Sizes that do not fill a tile, a panel or a block of terms; few rows; many columns; and empty products.
    const SIZES: [[usize; 3]; 14] = [
        [0, 3, 4],
        [3, 0, 4],
        [3, 4, 0],
        [1, 1, 1],
        [1, 300, 70],
        [5, 64, 33],
        [12, 256, 32],
        [13, 257, 31],
        [17, 5, 100],
        [40, 600, 65],
        [7, 90, 1200],
        [250, 33, 96],
        [1000, 64, 48],
        [64, 1000, 129],
    ];

    #[test]
    fn every_layout_has_the_bits_of_plain_sums() {
        for size @ [m, k, n] in SIZES {
            let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            let expected = plain(&a, &b, size);
            let (turned_a, turned_b) = (transpose(&a, m, k), transpose(&b, k, n));
            let left = [
                Matrix::new(&a, m, k),
                Matrix::new(&turned_a, k, m).transposed(),
            ];
            let right = [
                Matrix::new(&b, k, n),
                Matrix::new(&turned_b, n, k).transposed(),
            ];
            for a in left {
                for b in right {
                    let out = product(a, b);
                    assert_eq!(
                        out, expected,
                        "{size:?} {} {}",
                        a.is_transposed, b.is_transposed
                    );
                }
            }
        }
    }

    #[test]
    fn tasks_and_threads_change_no_bit() {
        let [m, k, n] = [200, 300, 130];
        let (a, b) = (numbers(m * k, 3), numbers(k * n, 4));
        let expected = plain(&a, &b, [m, k, n]);
        let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
        for rows in [12, 50, 200] {
            let mut out = vec![0.0; m * n];
            by_rows(
                a,
                Right::Packed(&panels(b)),
                rows,
                Start::Zero,
                unset::of(&mut out),
            );
            assert_eq!(out, expected);
        }
        for columns in [PANEL, 3 * PANEL, 8 * PANEL] {
            let mut out = vec![0.0; m * n];
            by_columns(a, b, columns, Start::Zero, unset::of(&mut out));
            assert_eq!(out, expected);
        }
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().expect("a thread pool");
            assert_eq!(pool.install(|| product(a, b)), expected);
        }
    }

    #[test]
    fn plain_registers_have_the_same_bits() {
        for size @ [m, k, n] in SIZES {
            let (a, b) = (numbers(m * k, 6), numbers(k * n, 7));
            let transposed = transpose(&b, k, n);
            let rights = [
                Matrix::new(&b, k, n),
                Matrix::new(&transposed, n, k).transposed(),
            ];
            for b in rights {
                let mut out = vec![0.0; m * n];
                if !out.is_empty() && k > 0 {
                    Task {
                        a: Matrix::new(&a, m, k),
                        first_row: 0,
                        b: Right::Plain(b),
                        first_column: 0,
                        start: Start::Zero,
                        out: &mut unset::of(&mut out).chunks_exact_mut(n).collect::<Vec<_>>(),
                    }
                    .run::<Plain>();
                }
                let wide = product(Matrix::new(&a, m, k), b);
                assert_eq!(out, wide, "{size:?} {}", b.is_transposed);
            }
        }
    }

    /// Each sum continues from the output, so a product computed in parts of its inner size has the bits of the
    /// complete one.
    #[test]
    fn parts_of_the_inner_size_add_up() {
        let [m, k, n] = [20, 700, 75];
        let (a, b) = (numbers(k * m, 8), numbers(k * n, 9));
        let whole = product(Matrix::new(&a, k, m).transposed(), Matrix::new(&b, k, n));
        let mut out = vec![0.0; m * n];
        for (first, last) in [(0, 300), (300, 301), (301, 700)] {
            let a = Matrix::new(&a[first * m..last * m], last - first, m).transposed();
            let b = Matrix::new(&b[first * n..last * n], last - first, n);
            product_into(a, b, Start::Output, &mut out);
        }
        assert_eq!(out, whole);
    }

    #[test]
    fn non_finite_values_do_not_spread() {
        let a = [1.0, f32::NAN, 2.0, 3.0];
        let b = numbers(2 * 40, 5);
        let out = product(Matrix::new(&a, 2, 2), Matrix::new(&b, 2, 40));
        assert!(out[..40].iter().all(|x| x.is_nan()));
        assert!(out[40..].iter().all(|x| x.is_finite()));
    }
}
