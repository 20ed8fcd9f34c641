//! Scoring on the CPU in f32: everything after the products is one pass over the logits.
//!
//! Sums have fixed lanes and pieces, functions are computed here or by `libm`, and each product is one chain over its
//! inner size: the bits of a token depend only on its own row and the head, not on the chunk, threads or processor.

use rayon::prelude::*;

use crate::product::{Matrix, Start, product_into};
use crate::vector::{LANES, exp, largest, sum_lanes, vectorised};

use super::Extras;

/// Least number of logits in memory at a time, for chunks with fewer: smaller pieces would cost more than they save.
const AT_ONCE: usize = 1 << 22;
/// Logits per task.
const TASK: usize = 1 << 15;
/// Numbers that are summed in f32.
const PIECE: usize = 64 * LANES;
/// Probabilities below e^NEGLIGIBLE count as 0 in gradients: multiplied by a gradient they would be numbers below 1e-38,
/// which processors multiply 20 to 60 times more slowly.
const NEGLIGIBLE: f32 = -64.0;

/// Operands of scoring.
///
/// # Shapes
/// `hidden`: `[N, width]`; `head`: `[V, width]`; `targets`: `[N]`, each below `V`
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub hidden: &'a [f32],
    pub head: &'a [f32],
    pub width: usize,
    pub targets: &'a [usize],
    pub temperature: f32,
    pub chunk: usize,
}

/// The forward pass's results for a token; see `Statistics`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scored {
    pub log_prob: f32,
    pub entropy: f32,
    pub sum_pi_squared: f32,
    pub largest: f32,
    pub log_sum: f32,
}

/// Coefficients of the gradient of a token's logits; see `TokenWeights`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weight {
    pub target: f32,
    pub constant: f32,
    /// 0 if entropies have no gradient.
    pub log_prob_factor: f32,
}

impl<'a> Operands<'a> {
    fn tokens(&self) -> usize {
        self.targets.len()
    }

    fn vocabulary(&self) -> usize {
        self.head.len() / self.width
    }

    /// Tokens `first..last` of the hidden states.
    fn rows(&self, first: usize, last: usize) -> Matrix<'a> {
        let values = &self.hidden[first * self.width..last * self.width];
        Matrix::new(values, last - first, self.width)
    }

    /// Rows `first..last` of the head.
    fn block(&self, first: usize, last: usize) -> Matrix<'a> {
        let values = &self.head[first * self.width..last * self.width];
        Matrix::new(values, last - first, self.width)
    }

    /// Scores of all tokens, `[N]`.
    pub fn forward(&self, extras: Extras) -> Vec<Scored> {
        let (n, v) = (self.tokens(), self.vocabulary());
        let chunk = self.chunk.max(AT_ONCE / v).min(n);
        let mut logits = vec![0.0; chunk * v];
        let mut found = vec![Scored::default(); n];
        let rows = (TASK / v).max(1);
        for (index, found) in found.chunks_mut(chunk).enumerate() {
            let first = index * chunk;
            let last = first + found.len();
            let logits = &mut logits[..found.len() * v];
            let head = self.block(0, v).transposed();
            product_into(self.rows(first, last), head, Start::Zero, logits);
            found
                .par_chunks_mut(rows)
                .zip(logits.par_chunks_mut(rows * v))
                .zip(self.targets[first..last].par_chunks(rows))
                .for_each(|((found, logits), targets)| {
                    let rows = logits.chunks_exact_mut(v).zip(targets);
                    for (found, (logits, &target)) in found.iter_mut().zip(rows) {
                        *found = score(logits, target, self.temperature, extras);
                    }
                });
        }
        found
    }

    /// Gradients of the hidden states and of the head, each if requested: `[N, width]` and `[V, width]`.
    pub fn backward(
        &self,
        found: &[Scored],
        weights: &[Weight],
        wanted: [bool; 2],
    ) -> [Option<Vec<f32>>; 2] {
        let (n, v) = (self.tokens(), self.vocabulary());
        let columns = (self.chunk * v).max(AT_ONCE).div_ceil(n).clamp(1, v);
        self.backward_in(columns, found, weights, wanted)
    }

    /// [`Operands::backward`] in blocks of `columns` tokens of the vocabulary.
    fn backward_in(
        &self,
        columns: usize,
        found: &[Scored],
        weights: &[Weight],
        [want_hidden, want_head]: [bool; 2],
    ) -> [Option<Vec<f32>>; 2] {
        let (n, v) = (self.tokens(), self.vocabulary());
        let mut d_hidden = want_hidden.then(|| vec![0.0; self.hidden.len()]);
        let mut d_head = want_head.then(|| vec![0.0; self.head.len()]);
        let mut logits = vec![0.0; n * columns];
        for first in (0..v).step_by(columns) {
            let last = v.min(first + columns);
            let width = last - first;
            let logits = &mut logits[..n * width];
            let head = self.block(first, last);
            product_into(self.rows(0, n), head.transposed(), Start::Zero, logits);
            let rows = (TASK / width).max(1);
            logits
                .par_chunks_mut(rows * width)
                .zip(found.par_chunks(rows))
                .zip(weights.par_chunks(rows))
                .zip(self.targets.par_chunks(rows))
                .for_each(|(((logits, found), weights), targets)| {
                    let rows = logits.chunks_exact_mut(width).zip(found);
                    for ((logits, found), (weight, &target)) in
                        rows.zip(weights.iter().zip(targets))
                    {
                        differentiate(logits, self.temperature, found, weight);
                        if (first..last).contains(&target) {
                            logits[target - first] += weight.target;
                        }
                    }
                });
            let d_logits = Matrix::new(logits, n, width);
            if let Some(d_head) = &mut d_head {
                // [columns, N] · [N, D] -> [columns, D]
                let rows = &mut d_head[first * self.width..last * self.width];
                product_into(d_logits.transposed(), self.rows(0, n), Start::Zero, rows);
            }
            if let Some(d_hidden) = &mut d_hidden {
                // [N, columns] · [columns, D] -> [N, D]; each sum continues through the blocks of the vocabulary.
                product_into(d_logits, head, Start::Output, d_hidden);
            }
        }
        [d_hidden, d_head]
    }
}

/// Scores of one token; divides its logits by the temperature.
fn score(logits: &mut [f32], target: usize, temperature: f32, extras: Extras) -> Scored {
    if temperature != 1.0 {
        vectorised(
            #[inline(always)]
            || logits.iter_mut().for_each(|logit| *logit /= temperature),
        );
    }
    let largest = largest(logits).unwrap_or(f32::NAN);
    let [sum, weighted, squares] = match extras {
        Extras::NONE => sums::<false, false>(logits, largest),
        Extras::ENTROPIES => sums::<true, false>(logits, largest),
        Extras {
            entropies: false, ..
        } => sums::<false, true>(logits, largest),
        Extras { .. } => sums::<true, true>(logits, largest),
    };
    let log_sum = libm::log(sum);
    Scored {
        log_prob: (logits[target] - largest) - log_sum as f32,
        // H = log Σ e − (Σ e s) / Σ e, with s the shifted logits and e their exponentials.
        entropy: (log_sum - weighted / sum) as f32,
        // Σ π² = Σ e² / (Σ e)²; the largest e is 1, so neither sum can vanish or overflow.
        sum_pi_squared: (squares / (sum * sum)) as f32,
        largest,
        log_sum: log_sum as f32,
    }
}

/// Σ e, Σ e s and Σ e², the second and third if requested, with s = z − largest and e = exp s.
fn sums<const WEIGHTED: bool, const SQUARES: bool>(logits: &[f32], largest: f32) -> [f64; 3] {
    /// Squares of smaller numbers would be below 1e-38.
    const SQUARED_FROM: f32 = 1e-18;
    vectorised(
        #[inline(always)]
        || {
            let mut sums = [0.0; 3];
            for piece in logits.chunks(PIECE) {
                let mut lanes = [[0.0_f32; LANES]; 3];
                let (chunks, rest) = piece.as_chunks::<LANES>();
                // Padding of the last chunk has the weight 0.
                let mut last = [f32::NEG_INFINITY; LANES];
                last[..rest.len()].copy_from_slice(rest);
                for chunk in chunks.iter().chain((!rest.is_empty()).then_some(&last)) {
                    for lane in 0..LANES {
                        let shifted = chunk[lane] - largest;
                        let is_there = chunk[lane] != f32::NEG_INFINITY;
                        let e = if is_there { exp(shifted) } else { 0.0 };
                        lanes[0][lane] += e;
                        if WEIGHTED {
                            let shifted = if is_there { shifted } else { 0.0 };
                            lanes[1][lane] = e.mul_add(shifted, lanes[1][lane]);
                        }
                        if SQUARES {
                            let e = if e > SQUARED_FROM { e } else { 0.0 };
                            lanes[2][lane] = e.mul_add(e, lanes[2][lane]);
                        }
                    }
                }
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum += f64::from(sum_lanes(lanes));
                }
            }
            sums
        },
    )
}

/// Turns logits into p · (constant + factor · log p).
fn differentiate(logits: &mut [f32], temperature: f32, found: &Scored, weight: &Weight) {
    let Scored {
        largest, log_sum, ..
    } = *found;
    let Weight {
        constant,
        log_prob_factor: factor,
        ..
    } = *weight;
    vectorised(
        #[inline(always)]
        || {
            for logit in logits.iter_mut() {
                let log_p = (*logit / temperature - largest) - log_sum;
                let d = exp(log_p) * factor.mul_add(log_p, constant);
                *logit = if log_p < NEGLIGIBLE { 0.0 } else { d };
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 20;
    const VOCABULARY: usize = 1_037;
    const TOKENS: usize = 9;
    const ALL: Extras = Extras {
        entropies: true,
        sum_pi_squared: true,
    };

    fn numbers(count: usize, salt: usize, scale: f32) -> Vec<f32> {
        let number = |i: usize| ((i + salt) * 7919 % 2003) as f32 / 1000.0 - 1.0;
        (0..count).map(|i| scale * number(i)).collect()
    }

    /// Hidden states, head and targets; the larger the scale, the more certain the tokens.
    struct Example(Vec<f32>, Vec<f32>, Vec<usize>);

    impl Example {
        fn new(scale: f32) -> Example {
            Example(
                numbers(TOKENS * WIDTH, 1, scale),
                numbers(VOCABULARY * WIDTH, 2, 1.0),
                (0..TOKENS).map(|i| i * 129).collect(),
            )
        }

        fn operands(&self, temperature: f32, chunk: usize) -> Operands<'_> {
            let Example(hidden, head, targets) = self;
            Operands {
                hidden,
                head,
                width: WIDTH,
                targets,
                temperature,
                chunk,
            }
        }

        /// Logits of a token in f64.
        fn logits(&self, token: usize, temperature: f32) -> Vec<f64> {
            let hidden = &self.0[token * WIDTH..][..WIDTH];
            let logit = |row: &[f32]| {
                let products = row.iter().zip(hidden);
                let sum: f64 = products.map(|(&w, &h)| f64::from(w) * f64::from(h)).sum();
                sum / f64::from(temperature)
            };
            self.1.chunks_exact(WIDTH).map(logit).collect()
        }
    }

    fn weights() -> Vec<Weight> {
        let weight = |i: usize| Weight {
            target: 0.1 * i as f32 - 0.3,
            constant: 0.2 - 0.05 * i as f32,
            log_prob_factor: 0.02 * i as f32,
        };
        (0..TOKENS).map(weight).collect()
    }

    #[track_caller]
    fn close(got: f32, expected: f64, what: &str) {
        let bound = 2e-5 * expected.abs().max(1.0);
        assert!(
            (f64::from(got) - expected).abs() < bound,
            "{what}: {got} differs from {expected}"
        );
    }

    #[test]
    fn scores_and_gradients_are_those_of_f64() {
        for (scale, temperature) in [(0.3, 1.0), (1.5, 0.7)] {
            let given = Example::new(scale);
            let operands = given.operands(temperature, 4);
            let found = operands.forward(ALL);
            let [d_hidden, d_head] = operands.backward(&found, &weights(), [true, true]);
            let (d_hidden, d_head) = (d_hidden.expect("requested"), d_head.expect("requested"));
            let mut expected = vec![0.0_f64; VOCABULARY * WIDTH];
            for (token, (found, weight)) in found.iter().zip(weights()).enumerate() {
                let logits = given.logits(token, temperature);
                let largest = logits.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = logits.iter().map(|z| libm::exp(z - largest)).sum();
                let log_p = |z: f64| z - largest - libm::log(sum);
                let p = logits.iter().map(|&z| libm::exp(log_p(z)));
                let entropy: f64 = p.clone().zip(&logits).map(|(p, &z)| -p * log_p(z)).sum();
                let squares: f64 = p.clone().map(|p| p * p).sum();
                close(found.log_prob, log_p(logits[given.2[token]]), "log-prob");
                close(found.entropy, entropy, "entropy");
                close(found.sum_pi_squared, squares, "sum of squares");
                let mut row = [0.0_f64; WIDTH];
                for (id, (p, &z)) in p.zip(&logits).enumerate() {
                    let constant = f64::from(weight.constant);
                    let mut d = p * (constant + f64::from(weight.log_prob_factor) * log_p(z));
                    if id == given.2[token] {
                        d += f64::from(weight.target);
                    }
                    for i in 0..WIDTH {
                        row[i] += d * f64::from(given.1[id * WIDTH + i]);
                        expected[id * WIDTH + i] += d * f64::from(given.0[token * WIDTH + i]);
                    }
                }
                for (&got, expected) in d_hidden[token * WIDTH..][..WIDTH].iter().zip(row) {
                    close(got, expected, "gradient of a hidden state");
                }
            }
            for (&got, expected) in d_head.iter().zip(expected) {
                close(got, expected, "gradient of the head");
            }
        }
    }

    /// The blocks of the vocabulary in the backward pass depend on the chunk and the tokens, so there are many here.
    #[test]
    fn neither_chunks_nor_other_tokens_change_a_bit() {
        let given = Example::new(1.0);
        let whole = given.operands(1.0, 1 << 20);
        let found = whole.forward(ALL);
        let [d_hidden, d_head] = whole.backward(&found, &weights(), [true, true]);
        let bits = |found: &Scored| {
            [found.log_prob, found.entropy, found.sum_pi_squared].map(f32::to_bits)
        };
        for token in 0..TOKENS {
            let single = Example(
                given.0[token * WIDTH..][..WIDTH].to_vec(),
                given.1.clone(),
                vec![given.2[token]],
            );
            let operands = single.operands(1.0, 1);
            let own = operands.forward(ALL);
            assert_eq!(bits(&own[0]), bits(&found[token]));
            let [own, _] = operands.backward(&own, &weights()[token..][..1], [true, false]);
            let all = d_hidden.as_ref().expect("requested");
            assert_eq!(own.expect("requested"), all[token * WIDTH..][..WIDTH]);
        }
        for columns in [1, 37, 512] {
            let [hidden, head] = whole.backward_in(columns, &found, &weights(), [true, true]);
            assert_eq!((&hidden, &head), (&d_hidden, &d_head), "{columns} columns");
        }
    }

    #[test]
    fn unlikely_tokens_leave_no_subnormal_gradients() {
        let given = Example::new(40.0);
        let operands = given.operands(1.0, 4);
        let found = operands.forward(ALL);
        let faint = weights().into_iter().map(|weight| Weight {
            constant: 1e-6 * weight.constant,
            ..weight
        });
        let faint: Vec<Weight> = faint.collect();
        let gradients = operands.backward(&found, &faint, [true, true]);
        for gradient in gradients.into_iter().flatten() {
            assert!(gradient.iter().all(|x| *x == 0.0 || x.is_normal()));
        }
    }

    #[test]
    fn a_non_finite_token_does_not_affect_others() {
        let mut given = Example::new(1.0);
        given.0[3 * WIDTH] = f32::NAN;
        let found = given.operands(1.0, 4).forward(ALL);
        for (token, found) in found.iter().enumerate() {
            let numbers = [found.log_prob, found.entropy, found.sum_pi_squared];
            assert_eq!(numbers.iter().all(|x| x.is_nan()), token == 3, "{token}");
            assert_eq!(numbers.iter().all(|x| x.is_finite()), token != 3, "{token}");
        }
        // A token that must not occur has a logit of −∞: it counts as 0.
        let mut logits = numbers(40, 3, 1.0);
        let without = score(&mut logits.clone(), 5, 1.0, ALL);
        logits.push(f32::NEG_INFINITY);
        let with = score(&mut logits, 5, 1.0, ALL);
        close(with.log_prob, f64::from(without.log_prob), "log-prob");
        close(with.entropy, f64::from(without.entropy), "entropy");
    }
}
