//! Layout of the boxes and edges of a layered graph: Sugiyama's four steps, for graphs of a few dozen boxes.
//!
//! Boxes are in even rows, each below all boxes that it depends on, and labels of edges in the odd rows between them,
//! so that they do not cover each other. An edge crosses every row between its ends as a narrow dummy box, which keeps
//! it away from the boxes in that row.

use std::cmp::Ordering;

/// Space between neighbours in a row.
const APART: f64 = 22.0;
/// Space between rows.
const BETWEEN_ROWS: f64 = 16.0;
/// Space around the drawing.
const MARGIN: f64 = 12.0;
/// Number of passes that order rows, and of passes that move boxes sideways.
const PASSES: usize = 80;
/// Weight of a dummy box, which keeps edges straight, relative to a box, which stays in the middle of its neighbours.
const EDGE_WEIGHT: f64 = 6.0;
/// Weight of a box without edges: it is placed beside the others, wherever they are.
const ISOLATED_WEIGHT: f64 = 1e-6;

/// Width and height.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Size {
    pub w: f64,
    pub h: f64,
}

/// An edge between two boxes; `from` is before `to`. A label without height takes no space.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Link {
    pub from: usize,
    pub to: usize,
    pub label: Size,
}

/// The course of an edge: corners from the writer's lower side to the reader's upper side, and the middle of its label.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Route {
    pub points: Vec<(f64, f64)>,
    pub label: (f64, f64),
}

/// A graph with coordinates, which increase to the right and downwards.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Placed {
    pub size: Size,
    /// Upper left corners of the boxes.
    pub boxes: Vec<(f64, f64)>,
    pub routes: Vec<Route>,
}

/// Places boxes and edges. Deterministic.
pub(crate) fn place(boxes: &[Size], links: &[Link]) -> Placed {
    let mut rows = Rows::new(boxes, links);
    rows.sort();
    rows.draw(&rows.columns())
}

/// Boxes, and one dummy box for each row that an edge crosses.
struct Rows {
    boxes: usize,
    sizes: Vec<Size>,
    row_of: Vec<usize>,
    /// Neighbours in the row above and in the row below.
    above: Vec<Vec<usize>>,
    below: Vec<Vec<usize>>,
    /// Each edge with the boxes along it, both ends included, and which of them has the label.
    chains: Vec<(Vec<usize>, usize)>,
    rows: Vec<Vec<usize>>,
}

impl Rows {
    fn new(boxes: &[Size], links: &[Link]) -> Rows {
        let row_of = depths(boxes.len(), links);
        let count = row_of.iter().max().map_or(0, |deepest| deepest + 1);
        let mut made = Rows {
            boxes: boxes.len(),
            sizes: boxes.to_vec(),
            above: vec![Vec::new(); boxes.len()],
            below: vec![Vec::new(); boxes.len()],
            chains: Vec::new(),
            rows: vec![Vec::new(); count],
            row_of,
        };
        for (index, row) in made.row_of.iter().enumerate() {
            made.rows[*row].push(index);
        }
        links.iter().for_each(|link| made.chain(link));
        made
    }

    fn chain(&mut self, link: &Link) {
        let (first, last) = (self.row_of[link.from], self.row_of[link.to]);
        // The odd row nearest to the middle, so that labels of long edges do not crowd below their writer.
        let labelled = first + 1 + (last - first - 2) / 4 * 2;
        let mut chain = vec![link.from];
        for row in first + 1..last {
            let index = self.sizes.len();
            let label = row == labelled;
            self.sizes
                .push(if label { link.label } else { Size::default() });
            self.row_of.push(row);
            self.above.push(Vec::new());
            self.below.push(Vec::new());
            self.rows[row].push(index);
            chain.push(index);
        }
        chain.push(link.to);
        for pair in chain.windows(2) {
            self.below[pair[0]].push(pair[1]);
            self.above[pair[1]].push(pair[0]);
        }
        self.chains.push((chain, labelled - first));
    }

    /// Orders each row to reduce crossings: by the mean position of the neighbours, alternating downwards and upwards.
    fn sort(&mut self) {
        let mut best = (self.crossings(), self.rows.clone());
        for pass in 0..PASSES {
            let count = self.rows.len();
            let order: Vec<usize> = match pass % 2 {
                0 => (0..count).collect(),
                _ => (0..count).rev().collect(),
            };
            for row in order {
                self.sort_row(row, pass.is_multiple_of(2));
            }
            let crossings = self.crossings();
            if crossings < best.0 {
                best = (crossings, self.rows.clone());
            }
        }
        self.rows = best.1;
    }

    fn sort_row(&mut self, row: usize, downwards: bool) {
        let neighbours = if downwards { &self.above } else { &self.below };
        let places = self.places();
        let mut keyed: Vec<(f64, usize)> = self.rows[row]
            .iter()
            .map(|index| {
                let near = neighbours[*index].iter().map(|near| places[*near] as f64);
                let mean = near.clone().sum::<f64>() / near.len() as f64;
                let is_isolated = neighbours[*index].is_empty();
                (
                    if is_isolated {
                        places[*index] as f64
                    } else {
                        mean
                    },
                    *index,
                )
            })
            .collect();
        keyed.sort_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        self.rows[row] = keyed.into_iter().map(|(_, index)| index).collect();
    }

    /// Position of every box in its row.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![0; self.sizes.len()];
        for row in &self.rows {
            for (at, index) in row.iter().enumerate() {
                places[*index] = at;
            }
        }
        places
    }

    fn crossings(&self) -> usize {
        let places = self.places();
        let of_row = |row: &Vec<usize>| {
            let pairs: Vec<(usize, usize)> = row
                .iter()
                .flat_map(|upper| self.below[*upper].iter().map(|lower| (*upper, *lower)))
                .map(|(upper, lower)| (places[upper], places[lower]))
                .collect();
            let cross = |a: &(usize, usize), b: &(usize, usize)| a.0 < b.0 && a.1 > b.1;
            let crossed = |a| pairs.iter().filter(|b| cross(a, b)).count();
            pairs.iter().map(crossed).sum::<usize>()
        };
        self.rows.iter().map(of_row).sum()
    }

    /// Horizontal middles of all boxes: each as near to its neighbours as the order of its row allows.
    fn columns(&self) -> Vec<f64> {
        let mut x = vec![0.0; self.sizes.len()];
        for pass in 0..=PASSES {
            let down = pass.is_multiple_of(2);
            let order: Vec<usize> = match down {
                true => (0..self.rows.len()).collect(),
                false => (0..self.rows.len()).rev().collect(),
            };
            for row in order.into_iter().map(|row| &self.rows[row]) {
                let wanted: Vec<f64> = row.iter().map(|i| self.wanted(*i, &x, pass)).collect();
                let weights: Vec<f64> = row.iter().map(|i| self.weight(*i)).collect();
                let apart: Vec<f64> = row
                    .windows(2)
                    .map(|pair| (self.sizes[pair[0]].w + self.sizes[pair[1]].w) / 2.0 + APART)
                    .collect();
                let placed = spread(&wanted, &weights, &apart);
                row.iter().zip(placed).for_each(|(i, at)| x[*i] = at);
            }
        }
        let left = |i: usize| x[i] - self.sizes[i].w / 2.0;
        let least = (0..x.len()).map(left).fold(f64::INFINITY, f64::min);
        x.iter().map(|at| at - least + MARGIN).collect()
    }

    fn weight(&self, index: usize) -> f64 {
        match index < self.boxes {
            true if self.is_isolated(index) => ISOLATED_WEIGHT,
            true => 1.0,
            false => EDGE_WEIGHT,
        }
    }

    fn is_isolated(&self, index: usize) -> bool {
        self.above[index].is_empty() && self.below[index].is_empty()
    }

    /// The middle of the neighbours: of those on the side that was just placed, and in later passes of both sides.
    fn wanted(&self, index: usize, x: &[f64], pass: usize) -> f64 {
        let both = pass > PASSES / 2;
        let sides = [
            (both || pass.is_multiple_of(2)).then_some(&self.above[index]),
            (both || pass % 2 == 1).then_some(&self.below[index]),
        ];
        let near: Vec<f64> = sides
            .into_iter()
            .flatten()
            .flatten()
            .map(|i| x[*i])
            .collect();
        let row = self.rows[self.row_of[index]].iter();
        let beside: Vec<f64> = row.filter(|i| **i != index).map(|i| x[*i]).collect();
        match near.len() {
            0 if self.is_isolated(index) && !beside.is_empty() => {
                beside.iter().sum::<f64>() / beside.len() as f64
            }
            0 => x[index],
            n => near.iter().sum::<f64>() / n as f64,
        }
    }

    fn draw(&self, x: &[f64]) -> Placed {
        let tall = |row: &Vec<usize>| row.iter().map(|i| self.sizes[*i].h).fold(0.0, f64::max);
        let heights: Vec<f64> = self.rows.iter().map(tall).collect();
        let tops: Vec<f64> = heights
            .iter()
            .scan(MARGIN, |y, height| {
                let top = *y;
                *y += height + BETWEEN_ROWS;
                Some(top)
            })
            .collect();
        let middle = |i: usize| tops[self.row_of[i]] + heights[self.row_of[i]] / 2.0;
        let right = (0..x.len()).map(|i| x[i] + self.sizes[i].w / 2.0);
        let routes = self.chains.iter().map(|(chain, labelled)| {
            let (from, to) = (chain[0], chain[chain.len() - 1]);
            let out = self.port(from, chain[1], &self.below[from], x);
            let into = self.port(to, chain[chain.len() - 2], &self.above[to], x);
            let mut points = vec![(out, middle(from) + self.sizes[from].h / 2.0)];
            for passed in &chain[1..chain.len() - 1] {
                let top = tops[self.row_of[*passed]];
                points.push((x[*passed], top));
                points.push((x[*passed], top + heights[self.row_of[*passed]]));
            }
            points.push((into, middle(to) - self.sizes[to].h / 2.0));
            let label = chain[*labelled];
            Route {
                points,
                label: (x[label], middle(label)),
            }
        });
        Placed {
            routes: routes.collect(),
            boxes: (0..self.boxes)
                .map(|i| {
                    (
                        x[i] - self.sizes[i].w / 2.0,
                        middle(i) - self.sizes[i].h / 2.0,
                    )
                })
                .collect(),
            size: Size {
                w: right.fold(0.0, f64::max) + MARGIN,
                h: heights.iter().sum::<f64>()
                    + BETWEEN_ROWS * heights.len().saturating_sub(1) as f64
                    + 2.0 * MARGIN,
            },
        }
    }

    /// Where the edge to `next` leaves a box: edges on one side are next to each other, in the order of their ends.
    fn port(&self, index: usize, next: usize, side: &[usize], x: &[f64]) -> f64 {
        let before = |other: &&usize| (x[**other], **other) < (x[next], next);
        let at = side.iter().filter(before).count() as f64;
        let share = (at + 1.0) / (side.len() as f64 + 1.0) - 0.5;
        x[index] + share * self.sizes[index].w * 0.8
    }
}

/// The row of each box: below all boxes that it depends on; without dependencies, directly above its first reader;
/// without edges, in the last row.
fn depths(boxes: usize, links: &[Link]) -> Vec<usize> {
    let mut sorted: Vec<&Link> = links.iter().collect();
    sorted.sort_by_key(|link| (link.from, link.to));
    let mut depth = vec![0; boxes];
    for link in &sorted {
        debug_assert!(link.from < link.to, "edges go to later boxes");
        depth[link.to] = depth[link.to].max(depth[link.from] + 2);
    }
    let deepest = depth.iter().copied().max().unwrap_or(0);
    for index in 0..boxes {
        if sorted.iter().any(|link| link.to == index) {
            continue;
        }
        let readers = sorted.iter().filter(|link| link.from == index);
        let first = readers.map(|link| depth[link.to]).min();
        depth[index] = first.map_or(deepest, |first| first - 2);
    }
    depth
}

/// The numbers nearest to `wanted` (least weighted squares) such that each is at least `apart` above the previous one:
/// isotonic regression by pooling adjacent violators.
fn spread(wanted: &[f64], weights: &[f64], apart: &[f64]) -> Vec<f64> {
    let offsets: Vec<f64> = std::iter::once(&0.0)
        .chain(apart)
        .scan(0.0, |sum, step| {
            *sum += step;
            Some(*sum)
        })
        .collect();
    // Blocks that move together: weighted sum, weight, members.
    let mut blocks: Vec<(f64, f64, usize)> = Vec::new();
    for ((wanted, weight), offset) in wanted.iter().zip(weights).zip(&offsets) {
        let mut block = ((wanted - offset) * weight, *weight, 1);
        while let Some(last) = blocks.last().copied() {
            if last.0 / last.1 <= block.0 / block.1 {
                break;
            }
            blocks.pop();
            block = (last.0 + block.0, last.1 + block.1, last.2 + block.2);
        }
        blocks.push(block);
    }
    let level = blocks
        .iter()
        .flat_map(|(sum, weight, members)| std::iter::repeat_n(sum / weight, *members));
    level.zip(offsets).map(|(at, offset)| at + offset).collect()
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
