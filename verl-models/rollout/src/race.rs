//! The Gumbel-max race that draws a token.

use verl_kernels::random::{Stream, gumbel, open_unit};

use super::sampling::{Draw, argmax, by_logit};

/// The Gumbel-max race: argmax of logitᵢ/T + gᵢ, lowest id among equals.
///
/// Id i can only win against a best score b when gᵢ > b − lᵢ, that is −ln u < e^(lᵢ − b); since 1 − u ≤ −ln u, only
/// when 1 − u < e^(lᵢ − b) = wᵢ·e^(−b), with the weights wᵢ that the softmax needs anyway. The test saves two
/// logarithms for nearly every id; if even the smallest 1 − u fails it, it also saves the random words.
pub(super) struct Race<'a> {
    logits: &'a [f32],
    weights: &'a [f32],
    max: f64,
    inverse: f64,
    stream: &'a Stream,
    position: u32,
}

/// The leader of a race: its score, id, and e^(−score) with slack for the rounding of weights.
#[derive(Clone, Copy)]
struct Leader {
    score: f64,
    id: u32,
    bar: f64,
}

impl<'a> Race<'a> {
    /// The race of a draw; `weights` are e^((logit − max)/T).
    pub fn new(
        logits: &'a [f32],
        weights: &'a [f32],
        max: f32,
        temperature: f64,
        draw: Draw<'a>,
    ) -> Self {
        Race {
            logits,
            weights,
            max: f64::from(max),
            inverse: (1.0 / temperature).min(f64::MAX),
            stream: draw.stream,
            position: draw.position as u32,
        }
    }

    /// The winner among all ids.
    pub fn among_all(&self) -> u32 {
        let mut leader = self.start(argmax(self.logits, self.max as f32));
        for (block, weights) in self.weights.chunks(4).enumerate() {
            let largest = weights.iter().fold(0.0_f32, |a, &b| a.max(b));
            if self.cannot_win(&leader, largest) {
                continue;
            }
            let words = self.stream.block(self.position, block as u32);
            for (lane, &word) in words.iter().take(weights.len()).enumerate() {
                self.challenge(&mut leader, (block * 4 + lane) as u32, word);
            }
        }
        leader.id
    }

    /// The winner among `ids`, which are in ascending order and not empty.
    pub fn among(&self, ids: &[u32]) -> u32 {
        let best = ids
            .iter()
            .copied()
            .min_by(by_logit(self.logits))
            .unwrap_or(0);
        let mut leader = self.start(best);
        for &id in ids {
            if !self.cannot_win(&leader, self.weights[id as usize]) {
                self.challenge(&mut leader, id, self.stream.word(self.position, id));
            }
        }
        leader.id
    }

    fn start(&self, id: u32) -> Leader {
        self.leader(id, self.stream.word(self.position, id))
    }

    fn leader(&self, id: u32, word: u32) -> Leader {
        const SLACK: f64 = 1.0001;
        let score = (f64::from(self.logits[id as usize]) - self.max) * self.inverse + gumbel(word);
        Leader {
            score,
            id,
            bar: libm::exp(-score) * SLACK,
        }
    }

    /// Whether an id of this weight cannot win with any word: the smallest 1 − u is 2⁻³³.
    fn cannot_win(&self, leader: &Leader, weight: f32) -> bool {
        const SMALLEST: f64 = 0.5 / 4_294_967_296.0;
        f64::from(weight) * leader.bar <= SMALLEST
    }

    fn challenge(&self, leader: &mut Leader, id: u32, word: u32) {
        if 1.0 - open_unit(word) >= f64::from(self.weights[id as usize]) * leader.bar {
            return;
        }
        let other = self.leader(id, word);
        if other.score > leader.score || (other.score == leader.score && id < leader.id) {
            *leader = other;
        }
    }
}
