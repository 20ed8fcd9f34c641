//! Divergences between the teacher's and the student's distribution over a few tokens.

use burn::tensor::Tensor;

use crate::error::{AlgoError, check_setting};
use crate::functions::{exp, log, log_softmax};
use crate::names::names;

/// Least mass of the tail: f32 cannot represent a smaller remainder of 1. No gradient flows through it there.
const TAIL_FLOOR: f64 = 1e-6;

names! {
    /// How the tokens outside the teacher's best K are treated.
    #[derive(Default)]
    Tail, "rule for the tail" {
        /// All of them are one more outcome, with the remaining mass, 1 − Σ e^{log-prob}. The divergence is then a lower
        /// bound of that over the vocabulary, and penalises a student that puts mass outside the best K. The default.
        #[default]
        Bucket = "bucket",
        /// They are left out, and both distributions are divided by their mass inside the best K. The student's mass
        /// outside is then not penalised.
        Renormalize = "renormalize",
    }
}

impl Tail {
    /// Turns log-probs of K tokens into those of a complete distribution over them (and the tail).
    ///
    /// # Shapes
    /// `log_probs`: `[N, K]`; result: `[N, K + 1]` with [`Tail::Bucket`], `[N, K]` with [`Tail::Renormalize`]
    pub fn distribution(&self, log_probs: Tensor<2>) -> Tensor<2> {
        let outcomes = match self {
            Tail::Renormalize => log_probs,
            Tail::Bucket => {
                let left = exp(log_probs.clone()).sum_dim(1).neg() + 1.0; // [N, 1]
                Tensor::cat(vec![log_probs, log(left.clamp_min(TAIL_FLOOR))], 1)
            }
        };
        // With a tail the mass is already 1, up to rounding and the floor.
        log_softmax(outcomes)
    }
}

/// A divergence D(p, q) of the student q from the teacher p, nats.
///
/// # Shapes
/// Log-probs of both `[N, K]`; result `[N]`.
/// # Differences
/// Over the teacher's best K tokens; GKD uses the vocabulary: see [`Tail`].
/// # Source
/// Agarwal et al. 2024 (GKD), arXiv:2306.13649, section 3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Divergence {
    /// KL(p‖q) = Σ p (log p − log q): the student covers all tokens that the teacher may produce.
    Forward,
    /// KL(q‖p) = Σ q (log q − log p): the student produces only tokens that the teacher may produce.
    Reverse,
    /// β KL(p‖m) + (1 − β) KL(q‖m), m = β p + (1 − β) q; never above the entropy of (β, 1 − β). Over β it tends to the
    /// forward KL for β → 0, over 1 − β to the reverse KL for β → 1.
    JensenShannon {
        /// Share of the teacher in the mixture, in (0, 1); ½ is symmetric.
        beta: f64,
    },
}

names! {
    /// The name of a divergence of the student q from the teacher p.
    #[derive(Default)]
    DivergenceName, "divergence" {
        /// KL(p‖q): the student covers all tokens that the teacher may produce.
        #[default]
        ForwardKl = "forward_kl",
        /// Between the two: the divergence of both from their mixture β p + (1 − β) q.
        JensenShannon = "jensen_shannon",
        /// KL(q‖p): the student produces only tokens that the teacher may produce.
        ReverseKl = "reverse_kl",
    }
}

impl Divergence {
    /// The divergence with this name; `beta` is used only by `jensen_shannon`, ½ by default.
    ///
    /// # Errors
    /// β outside (0, 1).
    pub fn named(name: DivergenceName, beta: Option<f64>) -> Result<Divergence, AlgoError> {
        let divergence = match name {
            DivergenceName::ForwardKl => Divergence::Forward,
            DivergenceName::JensenShannon => Divergence::JensenShannon {
                beta: beta.unwrap_or(0.5),
            },
            DivergenceName::ReverseKl => Divergence::Reverse,
        };
        divergence.check()?;
        Ok(divergence)
    }

    /// Rejects settings out of range.
    ///
    /// # Errors
    /// β outside (0, 1).
    pub fn check(&self) -> Result<(), AlgoError> {
        match *self {
            Divergence::JensenShannon { beta } => check_setting(
                "beta",
                beta,
                beta > 0.0 && beta < 1.0,
                "a mixture needs a share in (0, 1); for its ends use `forward_kl` and `reverse_kl`",
            ),
            Divergence::Forward | Divergence::Reverse => Ok(()),
        }
    }

    /// The divergence of each token, nats, differentiable in both.
    ///
    /// # Shapes
    /// `teacher`, `student`: log-probs of complete distributions, `[N, K]`; result: `[N]`
    pub fn tokens(&self, teacher: Tensor<2>, student: Tensor<2>) -> Tensor<1> {
        match *self {
            Divergence::Forward => kl(teacher, student),
            Divergence::Reverse => kl(student, teacher),
            Divergence::JensenShannon { beta } => {
                let mixture = log_add(
                    teacher.clone() + libm::log(beta),
                    student.clone() + libm::log1p(-beta),
                );
                kl(teacher, mixture.clone()) * beta + kl(student, mixture) * (1.0 - beta)
            }
        }
    }
}

/// Σ p (log p − log q), `[N, K]` to `[N]`.
fn kl(p: Tensor<2>, q: Tensor<2>) -> Tensor<1> {
    (exp(p.clone()) * (p - q)).sum_dim(1).squeeze_dim(1)
}

/// log(e^a + e^b); the larger is subtracted first and has no gradient, because it cancels.
fn log_add(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let larger = a.clone().max_pair(b.clone()).detach();
    let sum = exp(a - larger.clone()) + exp(b - larger.clone());
    log(sum) + larger
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::test::{constant, read};

    fn row(probabilities: &[f64]) -> Tensor<2> {
        let logs: Vec<f64> = probabilities.iter().map(|p| p.ln()).collect();
        constant(&logs).unsqueeze_dim(0)
    }

    #[track_caller]
    fn check(divergence: Divergence, tail: Tail, expected: f64) {
        let teacher = tail.distribution(row(&[0.5, 0.25]));
        let student = tail.distribution(row(&[0.25, 0.25]));
        let got = read(divergence.tokens(teacher, student))[0];
        assert!((got - expected).abs() < 1e-12, "{got}");
    }

    #[test]
    fn by_hand() {
        let ln = f64::ln;
        // Tails of 1/4 and 1/2.
        check(Divergence::Forward, Tail::Bucket, 0.25 * ln(2.0));
        check(Divergence::Reverse, Tail::Bucket, 0.25 * ln(2.0));
        let half = Divergence::JensenShannon { beta: 0.5 };
        // The mixture is (3, 2, 3) / 8.
        let side = 0.5 * ln(4.0 / 3.0) + 0.25 * ln(2.0 / 3.0);
        check(half, Tail::Bucket, side);
        // (2/3, 1/3) against (1/2, 1/2)
        let forward = 2.0 / 3.0 * ln(4.0 / 3.0) + 1.0 / 3.0 * ln(2.0 / 3.0);
        check(Divergence::Forward, Tail::Renormalize, forward);
        let reverse = 0.5 * ln(3.0 / 4.0) + 0.5 * ln(3.0 / 2.0);
        check(Divergence::Reverse, Tail::Renormalize, reverse);
        // β = 1/4: the mixture is (13/24, 11/24).
        let js = 0.25 * (2.0 / 3.0 * ln(16.0 / 13.0) + 1.0 / 3.0 * ln(8.0 / 11.0))
            + 0.75 * 0.5 * (ln(12.0 / 13.0) + ln(12.0 / 11.0));
        check(
            Divergence::JensenShannon { beta: 0.25 },
            Tail::Renormalize,
            js,
        );
    }

    #[test]
    fn a_tail_without_mass_is_harmless() {
        for name in DivergenceName::ALL {
            let divergence = Divergence::named(*name, None).unwrap();
            // Rounding may even make the remainder negative.
            let all = Tail::Bucket.distribution(row(&[0.75, 0.25 + 1e-9]));
            let same = divergence.tokens(all.clone(), all.clone());
            assert!(read(same)[0].abs() < 1e-12);
            let other = Tail::Bucket.distribution(row(&[0.5, 0.25]));
            let value = read(divergence.tokens(other, all))[0];
            assert!(value.is_finite() && value > 0.0, "{value}");
        }
    }

    #[test]
    fn a_mixture_has_both_parts() {
        for beta in [0.0, 1.0, f64::NAN] {
            assert!(Divergence::named(DivergenceName::JensenShannon, Some(beta)).is_err());
        }
    }
}
