//! The teacher's scores of the sampled tokens, as advantages for a policy loss.

use crate::advantages::backward_scan;
use crate::error::{AlgoError, check_finite, check_setting};
use crate::ragged::Ragged;

/// Â_t = Σ_{u ≥ t} γ^{u − t} (log p(y_u) − log q(y_u)), p the teacher and q the student that sampled y.
///
/// The expectation of log p − log q over the student's tokens is −KL(q‖p), so a policy loss with these advantages
/// minimises the reverse KL without any other log-prob of the teacher. With γ = 0 each token accounts only for its own
/// divergence; with γ = 1 also for that of the tokens after it. Observations are skipped and get 0.
///
/// # Shapes
/// `student_log_probs` (of the policy that sampled), `teacher_log_probs`, `actions`, result: `[B, T~]`, nats
/// # Errors
/// Rows whose lengths differ from those of `actions`; a log-prob of an action token that is not finite; γ outside [0,
/// 1].
/// # Differences
/// MiniLLM divides the sum by the number of remaining tokens and mixes the teacher into the sampling; neither is done
/// here.
/// # Source
/// Gu et al. 2024 (MiniLLM), arXiv:2306.08543, section 2.2, for γ = 1; Agarwal et al. 2024 (GKD),
/// arXiv:2306.13649, on distillation from the student's own samples.
pub fn teacher_advantages(
    student_log_probs: &Ragged<f64>,
    teacher_log_probs: &Ragged<f64>,
    actions: &Ragged<bool>,
    gamma: f64,
) -> Result<Ragged<f64>, AlgoError> {
    let unit = (0.0..=1.0).contains(&gamma);
    check_setting("gamma", gamma, unit, "it must lie in [0, 1]")?;
    let student = student_log_probs.select("student_log_probs", actions)?;
    let teacher = teacher_log_probs.select("teacher_log_probs", actions)?;
    check_finite("student_log_probs", &student)?;
    check_finite("teacher_log_probs", &teacher)?;
    let advantages = backward_scan(&actions.packed_rows(), 0.0, |t, next| {
        teacher[t] - student[t] + gamma * next
    });
    actions.scatter(&advantages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [Ragged<f64>; 2] {
        let student = Ragged::from_rows([vec![-1.0, f64::NAN, -2.0], vec![-0.5]]);
        let teacher = Ragged::from_rows([vec![-1.5, f64::NAN, -1.0], vec![-0.5]]);
        [student, teacher]
    }

    #[track_caller]
    fn check(gamma: f64, expected: &[f64]) {
        let actions = Ragged::<bool>::from_rows([vec![true, false, true], vec![true]]);
        let [student, teacher] = rows();
        let got = teacher_advantages(&student, &teacher, &actions, gamma).unwrap();
        assert_eq!(got.values(), expected);
    }

    #[test]
    fn by_hand() {
        check(0.0, &[-0.5, 0.0, 1.0, 0.0]);
        check(0.5, &[0.0, 0.0, 1.0, 0.0]);
        check(1.0, &[0.5, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn their_policy_gradient_is_that_of_the_reverse_kl() {
        // One token out of three, in expectation: −Σ_y q_y Â_y ∇log q_y = ∇KL(q‖p), with respect to logits z of q.
        let (q, p) = ([0.5f64, 0.3, 0.2], [0.2f64, 0.5, 0.3]);
        let ratio = |y: usize| (q[y] / p[y]).ln();
        let kl: f64 = (0..3).map(|y| q[y] * ratio(y)).sum();
        let actions = Ragged::<bool>::from_rows([[true]; 3]);
        let logs = |of: [f64; 3]| Ragged::<f64>::from_rows(of.map(|x| [x.ln()]));
        let advantages = teacher_advantages(&logs(q), &logs(p), &actions, 0.0).unwrap();
        for z in 0..3 {
            let slope = |y: usize| f64::from(u8::from(y == z)) - q[z];
            let policy: f64 = (0..3)
                .map(|y| -q[y] * advantages.values()[y] * slope(y))
                .sum();
            let exact = q[z] * (ratio(z) - kl);
            assert!((policy - exact).abs() < 1e-12);
        }
    }

    #[test]
    fn rejects_invalid_inputs() {
        let [student, teacher] = rows();
        let all = student.map(|_, _, _| true);
        let error = teacher_advantages(&student, &teacher, &all, 0.0).unwrap_err();
        assert!(error.to_string().contains("student_log_probs"), "{error}");
        let short = Ragged::<bool>::from_rows([[true]]);
        assert!(teacher_advantages(&student, &teacher, &short, 0.0).is_err());
        let none = student.map(|_, _, _| false);
        assert!(teacher_advantages(&student, &teacher, &none, 1.5).is_err());
    }
}
