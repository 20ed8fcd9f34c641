//! Weights, grids and bytes of tests.

use verl_reshard::{Block, Depth, Element, Grid, Layout, Ranks, Split, TensorSpec, Weight};

pub fn grid(pipeline: usize, tensor: usize, data: usize) -> Grid {
    Grid {
        pipeline,
        tensor,
        data,
    }
}

pub fn ranks(grid: Grid) -> Ranks {
    Ranks::grid(grid).expect("sizes above 0")
}

/// Two matrices per layer, one cut by rows and one by columns; `rows` and `columns` are multiples of the parts.
pub fn matrices(layers: usize, rows: usize, columns: usize) -> Vec<Weight> {
    let of = |layer: usize, axis: usize| Weight {
        spec: TensorSpec {
            name: format!("layers.{layer}.cut_{axis}"),
            element: if axis == 0 {
                Element::F32
            } else {
                Element::Bf16
            },
            shape: vec![rows, columns],
        },
        depth: Depth::Layer(layer),
        split: Some(Split { axis, unit: 1 }),
    };
    (0..layers)
        .flat_map(|layer| [of(layer, 0), of(layer, 1)])
        .collect()
}

/// Weights as a decoder has them: a tied embedding, grouped heads, norms and sizes that parts do not divide.
pub fn ragged(layers: usize) -> Vec<Weight> {
    let weight = |name: &str, shape: &[usize], depth, split: Option<(usize, usize)>| Weight {
        spec: TensorSpec {
            name: name.to_owned(),
            element: Element::F32,
            shape: shape.to_vec(),
        },
        depth,
        split: split.map(|(axis, unit)| Split { axis, unit }),
    };
    let mut all = vec![weight("embed", &[11, 6], Depth::Ends, Some((0, 1)))];
    for layer in 0..layers {
        let depth = Depth::Layer(layer);
        all.extend([
            weight(&format!("{layer}.q"), &[8, 6], depth, Some((0, 2))),
            weight(&format!("{layer}.k"), &[4, 6], depth, Some((0, 2))),
            weight(&format!("{layer}.out"), &[6, 8], depth, Some((1, 2))),
            weight(&format!("{layer}.norm"), &[6], depth, None),
        ]);
    }
    all.push(weight("scale", &[], Depth::Last, None));
    all
}

pub fn layout(weights: &[Weight], ranks: &Ranks) -> Layout {
    Layout::of(weights, ranks).expect("cuts that fit")
}

/// Whole tensors whose bytes all differ from those around them.
pub fn whole(layout: &Layout) -> Vec<Vec<u8>> {
    let tensors = layout.tensors().iter().enumerate();
    let byte = |tensor: usize, at: usize| (at * 7 + tensor * 31 + at / 251) as u8;
    tensors
        .map(|(tensor, spec)| (0..spec.bytes()).map(|at| byte(tensor, at)).collect())
        .collect()
}

/// All cells of a block.
pub fn cells(block: &Block) -> Vec<Vec<usize>> {
    block.0.iter().fold(vec![vec![]], |cells, axis| {
        let longer = cells.iter().flat_map(|cell| {
            axis.clone().map(move |at| {
                let mut cell = cell.clone();
                cell.push(at);
                cell
            })
        });
        longer.collect()
    })
}
