use proptest::prelude::*;

use super::*;

const BOX: Size = Size { w: 100.0, h: 40.0 };
const LABEL: Size = Size { w: 60.0, h: 14.0 };

fn link(from: usize, to: usize) -> Link {
    Link {
        from,
        to,
        label: LABEL,
    }
}

#[test]
fn numbers_are_spread_only_as_far_as_necessary() {
    // Already far enough apart.
    assert_eq!(spread(&[0.0, 10.0], &[1.0, 1.0], &[5.0]), [0.0, 10.0]);
    // Both want 0: they share the distance, and the heavier one moves less.
    assert_eq!(spread(&[0.0, 0.0], &[1.0, 1.0], &[8.0]), [-4.0, 4.0]);
    assert_eq!(spread(&[0.0, 0.0], &[3.0, 1.0], &[8.0]), [-2.0, 6.0]);
    assert_eq!(spread(&[], &[], &[]), [0.0; 0]);
}

#[test]
fn a_chain_is_in_one_column_and_an_isolated_box_in_the_last_row() {
    let placed = place(&[BOX; 4], &[link(0, 1), link(1, 2)]);
    let (x, y): (Vec<f64>, Vec<f64>) = placed.boxes.iter().copied().unzip();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-2;
    assert!(near(x[0], x[1]) && near(x[1], x[2]), "{x:?}");
    assert!(y[0] < y[1] && y[1] < y[2], "{y:?}");
    assert_eq!(y[3], y[2]);
    assert!(near((x[3] - x[2]).abs(), BOX.w + APART), "{x:?}");
    // Straight down, with the label between the two boxes.
    let first = &placed.routes[0];
    let mut points = first.points.iter();
    assert!(points.all(|(at, _)| near(*at, x[0] + BOX.w / 2.0)));
    assert!(first.label.1 > y[0] + BOX.h && first.label.1 < y[1]);
    assert_eq!(first.points.first().map(|p| p.1), Some(y[0] + BOX.h));
    assert_eq!(first.points.last().map(|p| p.1), Some(y[1]));
}

#[test]
fn a_source_is_directly_above_its_first_reader() {
    let placed = place(&[BOX; 4], &[link(0, 1), link(1, 3), link(2, 3)]);
    assert_eq!(placed.boxes[2].1, placed.boxes[1].1);
}

#[test]
fn avoidable_crossings_are_removed() {
    // In order of declaration, 0–3 and 1–2 cross.
    let mut rows = Rows::new(&[BOX; 4], &[link(0, 3), link(1, 2)]);
    assert!(rows.crossings() > 0);
    rows.sort();
    assert_eq!(rows.crossings(), 0);
}

#[test]
fn nothing_is_placed_for_an_empty_graph() {
    let placed = place(&[], &[]);
    assert_eq!((placed.boxes.len(), placed.routes.len()), (0, 0));
    assert_eq!(
        placed.size,
        Size {
            w: MARGIN,
            h: 2.0 * MARGIN
        }
    );
}

/// A rectangle by its corners.
type Rect = (f64, f64, f64, f64);

fn overlap(a: Rect, b: Rect) -> bool {
    let eps = 1e-6;
    a.0 + eps < b.2 && b.0 + eps < a.2 && a.1 + eps < b.3 && b.1 + eps < a.3
}

fn rect(corner: (f64, f64), size: Size) -> Rect {
    (corner.0, corner.1, corner.0 + size.w, corner.1 + size.h)
}

proptest! {
    #[test]
    fn nothing_overlaps_and_edges_run_downwards(
        widths in prop::collection::vec(40.0..220.0f64, 1..14),
        pairs in prop::collection::vec((0usize..14, 0usize..14), 0..30),
    ) {
        let boxes: Vec<Size> = widths.iter().map(|w| Size { w: *w, h: 44.0 }).collect();
        let mut links: Vec<Link> = pairs
            .iter()
            .filter(|(from, to)| from < to && *to < boxes.len())
            .map(|(from, to)| link(*from, *to))
            .collect();
        links.dedup();
        let placed = place(&boxes, &links);
        prop_assert_eq!(&placed, &place(&boxes, &links));
        let mut all: Vec<Rect> = placed.boxes.iter().zip(&boxes).map(|(at, size)| rect(*at, *size)).collect();
        all.extend(placed.routes.iter().map(|route| {
            rect((route.label.0 - LABEL.w / 2.0, route.label.1 - LABEL.h / 2.0), LABEL)
        }));
        for (at, a) in all.iter().enumerate() {
            prop_assert!(a.0 >= 0.0 && a.1 >= 0.0 && a.2 <= placed.size.w && a.3 <= placed.size.h);
            for b in &all[at + 1..] {
                prop_assert!(!overlap(*a, *b), "{a:?} {b:?}");
            }
        }
        for (route, link) in placed.routes.iter().zip(&links) {
            prop_assert!(route.points.windows(2).all(|pair| pair[0].1 <= pair[1].1));
            // Where it crosses a row of boxes it runs straight down beside them.
            for pair in route.points.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
                let line = (pair[0].0 - 1.0, pair[0].1, pair[1].0 + 1.0, pair[1].1);
                for (index, of_box) in all[..boxes.len()].iter().enumerate() {
                    prop_assert!([link.from, link.to].contains(&index) || !overlap(line, *of_box));
                }
            }
        }
    }
}
