//! Seconds of a small rollout with weights that are prepared for each call, and with an engine that keeps them, as one
//! JSON line. Both must give the same responses.
//!
//! ```text
//! cargo run --release -p verl-models --example repeated_rollouts -- MODEL_DIR [device=cpu] [rows=4] [new=8] [calls=41]
//! ```

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::error::Error;
use std::time::Instant;

use verl_models::Decoder;
use verl_models::device::device;
use verl_models::model::PolicyModel;
use verl_models::policy::Policy;
use verl_models::random::{DrawKey, Purpose};
use verl_models::rollout::engine::{
    EngineChoice, Event, RolloutOutput, RolloutRequest, SamplingSettings,
};
use verl_models::sampled::SampledPolicy;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, options @ ..] = args.as_slice() else {
        return Err(
            "usage: repeated_rollouts MODEL_DIR [device=cpu] [rows=4] [new=8] [calls=41]".into(),
        );
    };
    let given = |name: &str| {
        let mut values = options
            .iter()
            .filter_map(|o| o.strip_prefix(name)?.strip_prefix('='));
        values.next_back()
    };
    let number = |name: &str, default: usize| given(name).map_or(Ok(default), str::parse);
    let (rows, new, calls) = (number("rows", 4)?, number("new", 8)?, number("calls", 41)?);
    let decoder = Decoder::load(folder.as_ref(), &device(given("device").unwrap_or("cpu"))?)?;
    let mut policy = SampledPolicy::new(Box::new(Policy::new(decoder, None)?));
    let request = |row: usize| RolloutRequest {
        prompt: (1..9).collect(),
        key: DrawKey {
            seed: 1,
            purpose: Purpose::Rollout,
            step: 1,
            row: row as u64,
            attempt: 0,
        },
        max_new_tokens: new,
    };
    let requests: Vec<RolloutRequest> = (0..rows).map(request).collect();
    // In turn, so that other work of the machine affects both.
    let (mut fresh, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..calls {
        let start = Instant::now();
        let expected = prepared_for_the_call(policy.policy(), &requests)?;
        fresh.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let got = from_the_engine(&mut policy, &requests)?;
        kept.push(start.elapsed().as_secs_f64());
        if got != expected {
            return Err("the engine's responses differ from those of a single call".into());
        }
    }
    let [fresh, kept] = [fresh, kept].map(median);
    println!(
        "{{\"fresh_s\": {fresh:.6}, \"kept_s\": {kept:.6}, \"ratio\": {:.2}, \"loads\": {}}}",
        fresh / kept,
        policy.loads()
    );
    Ok(())
}

fn prepared_for_the_call(
    policy: &dyn PolicyModel,
    requests: &[RolloutRequest],
) -> Result<Vec<Option<RolloutOutput>>, Box<dyn Error>> {
    let mut outputs = vec![None; requests.len()];
    policy.generate(requests, &SamplingSettings::default(), &mut |at, output| {
        outputs[at] = Some(output);
        Ok(())
    })?;
    Ok(outputs)
}

fn from_the_engine(
    policy: &mut SampledPolicy,
    requests: &[RolloutRequest],
) -> Result<Vec<Option<RolloutOutput>>, Box<dyn Error>> {
    let mut outputs = vec![None; requests.len()];
    let (engine, settings) = (EngineChoice::default(), SamplingSettings::default());
    policy.generate(&engine, requests, &settings, &mut |event| {
        if let Event::Done {
            request, output, ..
        } = event
        {
            outputs[request] = Some(output);
        }
        Ok(())
    })?;
    Ok(outputs)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
