//! The heads: V, Q and Q̂.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData, activation};
use verl_decoder::blocks::linear::Linear;
use verl_decoder::parameters::fill_parameters;
use verl_kernels::random;
use verl_kernels::scoring::log_sums;

/// Q heads of a model; using the smaller of two estimates avoids overestimation.
pub const Q_HEADS: usize = 2;

/// W₂ relu(W₁ x + b₁) + b₂, with an inner width twice that of the hidden state.
#[derive(Module, Debug)]
pub struct Head {
    /// `[2D, D]`.
    pub first: Linear,
    /// `[out, 2D]`.
    pub second: Linear,
}

impl Head {
    fn lazy(width: usize, out: usize, device: &Device) -> Self {
        Head {
            first: Linear::lazy(2 * width, width, true, device),
            second: Linear::lazy(out, 2 * width, true, device),
        }
    }

    /// # Shapes
    /// `x`: `[N, D]`; result: `[N, out]`
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(activation::relu(self.first.forward(x)))
    }

    /// Moves this head a step towards another one.
    fn follow(self, other: &Head, alpha: f64) -> Head {
        let linear = |own: Linear, other: &Linear| Linear {
            weight: follow(own.weight, &other.weight, alpha),
            bias: match (own.bias, &other.bias) {
                (Some(own), Some(other)) => Some(follow(own, other, alpha)),
                (own, _) => own,
            },
        };
        Head {
            first: linear(self.first, &other.first),
            second: linear(self.second, &other.second),
        }
    }
}

/// α other + (1 − α) own, without gradient.
fn follow<const D: usize>(
    own: Param<Tensor<D>>,
    other: &Param<Tensor<D>>,
    alpha: f64,
) -> Param<Tensor<D>> {
    let other = other.val().detach();
    own.map(|own| other * alpha + own.detach() * (1.0 - alpha))
}

/// The values of states and of tokens in them.
///
/// Dims: `N` states, `D` width, `V` vocabulary.
#[derive(Module, Debug)]
pub struct IlqlHeads {
    /// V, the value of a state.
    pub value: Head,
    /// Q, the value of every token in a state; [`Q_HEADS`] estimates.
    pub qs: Vec<Head>,
    /// Q̂, a slow copy of each Q.
    pub target_qs: Vec<Head>,
}

impl IlqlHeads {
    /// Heads that always output 0: W₁ is drawn from N(0, 1 / D) with the seed, everything else is zero. Each Q̂ equals
    /// its Q.
    pub fn fresh(width: usize, vocab: usize, seed: u64, device: &Device) -> Self {
        let several = || {
            (0..Q_HEADS)
                .map(|_| Head::lazy(width, vocab, device))
                .collect()
        };
        let lazy = IlqlHeads {
            value: Head::lazy(width, 1, device),
            qs: several(),
            target_qs: several(),
        };
        let scale = 1.0 / (width as f32).sqrt();
        fill_parameters(lazy, DType::F32, |name, shape| {
            let count = shape.iter().product();
            let values = if name.ends_with("first.weight") {
                let origin = format!("ilql_heads.{}", name.replace("target_", ""));
                let draws = random::normals(seed, &origin, count);
                draws.into_iter().map(|draw| draw * scale).collect()
            } else {
                vec![0.0; count]
            };
            Some(TensorData::new(values, shape.to_vec()))
        })
    }

    /// The number of weights of all heads.
    pub fn num_parameters(width: usize, vocab: usize) -> u64 {
        let head = |out: usize| (2 * width * (width + 1) + out * (2 * width + 1)) as u64;
        head(1) + 2 * Q_HEADS as u64 * head(vocab)
    }

    /// V of each state.
    ///
    /// # Shapes
    /// `hidden`: `[N, D]`; result: `[N]`
    pub fn values(&self, hidden: Tensor<2>) -> Tensor<1> {
        self.value.forward(hidden).squeeze_dim(1)
    }

    /// Q of every token in each state, one tensor per head.
    ///
    /// # Shapes
    /// `hidden`: `[N, D]`; each result: `[N, V]`
    pub fn qs(&self, hidden: Tensor<2>) -> Vec<Tensor<2>> {
        let each = self.qs.iter();
        each.map(|head| head.forward(hidden.clone())).collect()
    }

    /// Q̂ of every token in each state, one tensor per head.
    ///
    /// # Shapes
    /// As [`IlqlHeads::qs`].
    pub fn target_qs(&self, hidden: Tensor<2>) -> Vec<Tensor<2>> {
        let each = self.target_qs.iter();
        each.map(|head| head.forward(hidden.clone())).collect()
    }

    /// log π + β (min Q̂ − V) for the policy's `logits`.
    ///
    /// # Shapes
    /// `logits`, result: `[N, V]`; `hidden`: `[N, D]`
    pub fn shifted(&self, logits: Tensor<2>, hidden: Tensor<2>, beta: f64) -> Tensor<2> {
        let values = self.values(hidden.clone()).unsqueeze_dim(1);
        let smallest = self.target_qs(hidden).into_iter().reduce(Tensor::min_pair);
        let below = logits.clone() - logits.max_dim(1);
        let log_probs = below.clone() - log_sums(below);
        match smallest {
            Some(smallest) => log_probs + (smallest - values) * beta,
            None => log_probs,
        }
    }

    /// Q̂ ← α Q + (1 − α) Q̂.
    #[must_use]
    pub fn synced(self, alpha: f64) -> Self {
        let IlqlHeads {
            value,
            qs,
            target_qs,
        } = self;
        let each = target_qs.into_iter().zip(&qs);
        let target_qs = each.map(|(target, q)| target.follow(q, alpha)).collect();
        IlqlHeads {
            value,
            qs,
            target_qs,
        }
    }
}
