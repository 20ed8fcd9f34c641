//! Items in buckets of a fixed size.

use std::ops::Range;

/// A part of an item in a bucket.
pub(crate) struct Slot {
    /// Position of the item.
    pub(crate) item: usize,
    /// Its cells, in row-major order.
    pub(crate) cells: Range<usize>,
    /// First byte in the bucket.
    pub(crate) offset: usize,
}

/// Packs items in order. An item that does not fit into the rest of a bucket starts the next one; one that is larger than a
/// bucket is cut. Items are numbers of cells and bytes per cell; `capacity` is at least the size of a cell.
pub(crate) fn packed(
    items: impl IntoIterator<Item = (usize, usize)>,
    capacity: usize,
) -> Vec<Vec<Slot>> {
    let mut buckets: Vec<Vec<Slot>> = Vec::new();
    let mut free = 0;
    for (item, (cells, size)) in items.into_iter().enumerate() {
        let most = capacity / size;
        let mut done = 0;
        while done < cells {
            let next = cells.min(done + most);
            let bytes = (next - done) * size;
            if buckets.is_empty() || bytes > free {
                buckets.push(Vec::new());
                free = capacity;
            }
            if let Some(bucket) = buckets.last_mut() {
                let offset = capacity - free;
                bucket.push(Slot {
                    item,
                    cells: done..next,
                    offset,
                });
            }
            free -= bytes;
            done = next;
        }
    }
    buckets
}
