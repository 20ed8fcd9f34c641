//! Keys and values cached while decoding, in blocks of tokens.

/// Tokens per block.
pub(super) const BLOCK: usize = 16;

/// Shape of what a cache stores for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Key/value heads, `K`.
    pub heads: usize,
    /// Width of a head, `Dh`.
    pub dim: usize,
}

impl KvShape {
    /// `Dh` rounded up, so that values fill complete registers.
    pub fn padded_dim(self) -> usize {
        self.dim.next_multiple_of(8)
    }

    fn head_size(self) -> usize {
        BLOCK * (self.dim + self.padded_dim())
    }

    fn block_size(self) -> usize {
        self.heads * self.head_size()
    }
}

/// Keys and values of consecutive tokens. Memory grows with the tokens, a block of 16 at a time.
///
/// In a block, each head stores its keys with tokens innermost, `[Dh][16]`, so that one pass computes the scores of all
/// sixteen; then its values with tokens outermost, `[16][Dh]`. Slots without a token contain zeros.
#[derive(Debug, Clone)]
pub struct KvTrack {
    shape: KvShape,
    layers: Vec<Vec<f32>>,
    tokens: usize,
}

impl KvTrack {
    /// An empty track.
    pub fn new(shape: KvShape) -> Self {
        KvTrack {
            shape,
            layers: vec![Vec::new(); shape.layers],
            tokens: 0,
        }
    }

    /// The number of tokens that every layer has stored.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether no token was stored.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Adds `tokens` to the length, after all layers have written them.
    pub fn advance(&mut self, tokens: usize) {
        self.tokens += tokens;
    }

    /// Writes the keys and values of token `index` in `layer`.
    ///
    /// # Shapes
    /// `keys`, `values`: `[K·Dh]`
    pub fn write(&mut self, layer: usize, index: usize, keys: &[f32], values: &[f32]) {
        let shape = self.shape;
        let (block, slot) = (index / BLOCK, index % BLOCK);
        let data = &mut self.layers[layer];
        if data.len() <= block * shape.block_size() {
            data.resize((block + 1) * shape.block_size(), 0.0);
        }
        let heads = data[block * shape.block_size()..].chunks_exact_mut(shape.head_size());
        let (keys, values) = (keys.chunks_exact(shape.dim), values.chunks_exact(shape.dim));
        for ((head, keys), values) in heads.zip(keys).zip(values) {
            let (key_part, value_part) = head.split_at_mut(BLOCK * shape.dim);
            for (lanes, &key) in key_part.chunks_exact_mut(BLOCK).zip(keys) {
                lanes[slot] = key;
            }
            let start = slot * shape.padded_dim();
            value_part[start..start + shape.dim].copy_from_slice(values);
        }
    }

    /// Keys `[Dh][16]` and values `[16][padded Dh]` of one head in one block.
    #[inline(always)]
    pub fn block(&self, layer: usize, block: usize, head: usize) -> (&[f32], &[f32]) {
        let start = block * self.shape.block_size() + head * self.shape.head_size();
        self.layers[layer][start..start + self.shape.head_size()].split_at(BLOCK * self.shape.dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        layers: 1,
        heads: 2,
        dim: 2,
    };

    #[test]
    fn tokens_are_stored_where_attention_reads_them() {
        let mut track = KvTrack::new(SHAPE);
        for token in 0..18 {
            let t = token as f32;
            track.write(0, token, &[t, 0.1, -t, 0.2], &[t, 1.0, -t, 2.0]);
        }
        track.advance(18);
        assert_eq!(track.len(), 18);
        let (keys, values) = track.block(0, 1, 1);
        assert_eq!(keys[..3], [-16.0, -17.0, 0.0]);
        assert_eq!(keys[BLOCK..BLOCK + 3], [0.2, 0.2, 0.0]);
        assert_eq!(values[..2], [-16.0, 2.0]);
        assert_eq!(values[8..10], [-17.0, 2.0]);
        assert_eq!(values[16..18], [0.0, 0.0]);
    }

    #[test]
    fn memory_grows_with_the_tokens() {
        let mut track = KvTrack::new(SHAPE);
        assert_eq!(track.layers[0].len(), 0);
        track.write(0, 0, &[0.0; 4], &[0.0; 4]);
        assert_eq!(track.layers[0].len(), SHAPE.block_size());
    }
}
