//! Rules that compare the latest steps with the first steps of the run, or with earlier ones.

use verl_words::stage::MetricRole;

use super::metrics::{RECENT, metrics};
use super::robust::{deviation, median, percent, shown, times};
use super::{EARLY_STEPS, Hit, MetricsView};

/// If more than this share of the responses is cut off, their length reflects the limit.
const MOST_CUT: f64 = 0.5;
/// Shortest mean length of the first steps that can collapse, and the collapsed length if those were cut off (tokens).
const SHORTEST: f64 = 4.0;
const NOTHING: f64 = 2.0;
/// Steps in a row in which lengths have to be short.
const SHORT_STEPS: usize = 2;
/// Growth of the mean length, and of the share of cut-off responses, at which responses run into the limit.
const GROWTH: f64 = 1.5;
const MORE_CUT: f64 = 0.2;
/// Nats by which an entropy has to be above that of the first steps.
const MORE_ENTROPY: f64 = 1.0;
/// Fewest earlier steps that a reward is compared with.
const REWARD_HISTORY: usize = 16;
/// Least deviation of rewards, as a share of their median or of [`REWARD_SIZE`], whichever is larger.
const REWARD_SHARE: f64 = 0.02;
const REWARD_SIZE: f64 = 0.5;
/// Number of steps whose explained variance is checked, number of steps before them, and the least rise of a critic
/// that learns.
const CRITIC_RECENT: usize = 16;
const CRITIC_WARMUP: usize = 32;
const CRITIC_RISE: f64 = 0.1;
/// Number of steps whose log-probs are checked, and the least fall, in deviations of the first steps.
const PAIR_RECENT: usize = 8;
const PAIR_DEVIATIONS: f64 = 4.0;

/// Value of a metric in the first steps: their upper quartile, which a collapse among them does not hide; `None` with
/// fewer than two.
pub(super) fn baseline(first: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = first.iter().copied().filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1).filter(|last| *last > 0)?;
    sorted.get((last * 3).div_ceil(4)).copied()
}

pub(super) fn entropy_explosion(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::Entropy], |name, _| {
        let first = view.first(name);
        // The first steps are not compared with themselves.
        let was = median(&first).filter(|_| first.len() == EARLY_STEPS)?;
        let entropy = median(&view.last(name, RECENT)?)?;
        (entropy > limit * was && entropy > was + MORE_ENTROPY).then(|| {
            format!(
                "the entropy is {} nats per token (median of {RECENT} steps), {} that of the first {EARLY_STEPS} steps ({})",
                shown(entropy),
                times(entropy / was),
                shown(was)
            )
        })
    })
}

pub(super) fn length_collapse(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::ResponseLength], |name, value| {
        let was = baseline(&view.first(name)).filter(|was| *was >= SHORTEST)?;
        let truncated = view.named(MetricRole::TruncatedShare);
        let cut_then = truncated.and_then(|name| median(&view.first(name)));
        let were_cut = cut_then.is_some_and(|share| share > MOST_CUT);
        let least = match were_cut {
            true => NOTHING.min(limit * was),
            false => limit * was,
        };
        let last = view.last(name, SHORT_STEPS)?;
        last.iter().all(|length| *length < least).then(|| {
            format!(
                "responses have {} tokens on average, {} in the first steps",
                shown(value),
                shown(was)
            )
        })
    })
}

pub(super) fn length_growth(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::ResponseLength], |name, value| {
        let was = median(&view.first(name)).filter(|_| view.history.len() >= EARLY_STEPS)?;
        let truncated = view.named(MetricRole::TruncatedShare)?;
        let cut_then = median(&view.first(truncated))?;
        let cut = median(&view.last(truncated, RECENT)?)?;
        let length = median(&view.last(name, RECENT)?)?;
        (cut > limit && cut > cut_then + MORE_CUT && length > GROWTH * was).then(|| {
            format!(
                "responses have {} tokens on average, {} in the first steps, and {} of them reach the token limit, {} then",
                shown(value),
                shown(was),
                percent(cut),
                percent(cut_then)
            )
        })
    })
}

pub(super) fn reward_collapse(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::Reward], |name, _| {
        let change = RewardChange::of(view, name)?;
        (change.deviations() < -limit).then(|| change.describe("fell"))
    })
}

pub(super) fn reward_jump(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::Reward], |name, _| {
        let change = RewardChange::of(view, name)?;
        (change.deviations() > limit).then(|| change.describe("rose"))
    })
}

/// The reward of the latest steps and of the steps before them.
struct RewardChange {
    was: f64,
    now: f64,
    deviation: f64,
    steps: usize,
}

impl RewardChange {
    fn of(view: &MetricsView<'_>, name: &str) -> Option<RewardChange> {
        let now = median(&view.last(name, RECENT)?)?;
        let mut before = view.before(name);
        before.truncate(before.len().saturating_sub(RECENT - 1));
        let was = median(&before).filter(|_| before.len() >= REWARD_HISTORY)?;
        let least = REWARD_SHARE * was.abs().max(REWARD_SIZE);
        Some(RewardChange {
            was,
            now,
            deviation: deviation(&before)?.max(least),
            steps: before.len(),
        })
    }

    fn deviations(&self) -> f64 {
        (self.now - self.was) / self.deviation
    }

    fn describe(&self, verb: &str) -> String {
        format!(
            "the mean reward {verb} from {} (median of {} steps) to {} (of {RECENT}), by {:.0} deviations",
            shown(self.was),
            self.steps,
            shown(self.now),
            self.deviations().abs()
        )
    }
}

pub(super) fn blind_critic(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::ExplainedVariance], |name, _| {
        let known = view.before(name);
        let recent = known.len().checked_sub(CRITIC_RECENT)?;
        let explained = median(&known[recent..])?;
        let was = median(&known[recent.checked_sub(CRITIC_RECENT)?..recent])?;
        let learns = explained > was + CRITIC_RISE;
        (recent >= CRITIC_WARMUP && explained < limit && !learns).then(|| {
            format!(
                "the values explain {} of the variance of the returns (median of {CRITIC_RECENT} steps), less than a constant would",
                shown(explained)
            )
        })
    })
}

pub(super) fn chosen_falls(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::ChosenLogProb], |name, _| {
        let chosen = fall(view, name, limit)?;
        let rejected = fall(view, view.named(MetricRole::RejectedLogProb)?, 0.0)?;
        Some(format!(
            "the log-prob of chosen answers fell from {} in the first steps to {} nats, that of rejected ones from {} to {}: both answers become less likely",
            shown(chosen.0),
            shown(chosen.1),
            shown(rejected.0),
            shown(rejected.1)
        ))
    })
}

/// Medians of the first and of the latest steps, if the latter is smaller by more than chance and by this share.
fn fall(view: &MetricsView<'_>, name: &str, share: f64) -> Option<(f64, f64)> {
    let first = view.first(name);
    let was = median(&first).filter(|_| first.len() == EARLY_STEPS)?;
    let now = median(&view.last(name, PAIR_RECENT)?)?;
    let fell = was - now;
    (fell > share * was.abs() && fell > PAIR_DEVIATIONS * deviation(&first)?).then_some((was, now))
}

pub(super) fn kto_baseline(view: &MetricsView<'_>, limit: f64) -> Vec<Hit> {
    metrics(view, &[MetricRole::RewardBaseline], |_, value| {
        (value.is_nan() || value > limit).then(|| {
            format!(
                "z₀, the estimated distance from the reference, is {} nats, above {}",
                shown(value),
                shown(limit)
            )
        })
    })
}
