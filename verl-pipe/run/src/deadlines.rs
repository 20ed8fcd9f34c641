//! Deadlines: calls that take too long are abandoned, and a step that failed leaves nothing running.

use std::time::{Duration, Instant};

use verl_plan::schedule::placement::Place;
use verl_words::stage::Stage;

use crate::channel::{CallFailure, Event, TICK};
use crate::error::RunError;
use crate::host_calls::describe_rows;
use crate::host_pool::MAX_HUNG;
use crate::runner::{GRACE, InFlight, Progress, Run};
use crate::spans::SpanOutcome;
use crate::start::no_thread;

impl Run {
    /// Time until the next deadline, or until the cancel token must be checked.
    pub(super) fn next_check(&self, progress: &Progress) -> Duration {
        let left = progress.in_flight.values().filter_map(|flight| {
            let host = flight.host.as_ref()?;
            let deadline = self.unit_deadline(flight)?;
            let since = host.cell.lock().unit_since.unwrap_or_else(Instant::now);
            Some(deadline.saturating_sub(since.elapsed()))
        });
        left.min()
            .unwrap_or(TICK)
            .clamp(Duration::from_millis(1), TICK)
    }

    /// Deadline of the unit that a host call is processing, if the stage has one.
    pub(super) fn unit_deadline(&self, flight: &InFlight) -> Option<Duration> {
        let deadline = self.schedule.plan().stages()[flight.id.0].spec().deadline?;
        let host = flight.host.as_ref()?;
        let unit = host.units.get(host.cell.lock().finished.len())?;
        Some(deadline.saturating_mul(unit.num_rows().max(1) as u32))
    }

    /// Abandons calls that have exceeded their deadline.
    pub(super) fn check_deadlines(&mut self, progress: &mut Progress) -> Result<(), RunError> {
        let late: Vec<u64> = progress
            .in_flight
            .iter()
            .filter(|(_, flight)| self.is_late(flight).is_some())
            .map(|(call, _)| *call)
            .collect();
        if !late.is_empty() {
            progress.late = Some(self.stall_report(progress));
        }
        for call in late {
            let Some(flight) = progress.in_flight.remove(&call) else {
                continue;
            };
            let Some((waited, deadline)) = self.is_late(&flight) else {
                progress.in_flight.insert(call, flight);
                continue;
            };
            let error = self.deadline_error(progress, &flight, waited, deadline);
            let Some(host) = &flight.host else {
                self.abandon_worker(flight.id.0);
                self.note_abandoned_call(progress, call, &flight);
                if self.recovers(progress, flight.id.0) {
                    let reason = format!(
                        "its call did not end within {:.1} s",
                        deadline.as_secs_f64()
                    );
                    self.recover_call(progress, flight, CallFailure::Lost(reason))?;
                    continue;
                }
                return Err(error);
            };
            let runs = {
                let mut cell = host.cell.lock();
                // It may have ended in the meantime; then its event is already queued.
                let runs = cell.unit_since.is_some();
                cell.abandoned = runs;
                runs
            };
            if !runs {
                progress.in_flight.insert(call, flight);
                continue;
            }
            progress.host_running -= 1;
            self.replace_thread(flight.id.0)?;
            self.end_host_call(progress, flight, Some((error, waited.as_secs_f64())))?;
        }
        Ok(())
    }

    pub(super) fn replace_thread(&mut self, stage: usize) -> Result<(), RunError> {
        self.pool.replace_hung().map_err(no_thread)?;
        if self.pool.num_hung() > MAX_HUNG {
            return Err(RunError::TooManyHung {
                hung: self.pool.num_hung(),
                stage: self.name(stage).to_owned(),
            });
        }
        Ok(())
    }

    /// Elapsed time and deadline of the call, if it is late.
    pub(super) fn is_late(&self, flight: &InFlight) -> Option<(Duration, Duration)> {
        let (since, deadline) = match &flight.host {
            Some(host) => {
                let since = host.cell.lock().unit_since?;
                (since, self.unit_deadline(flight).unwrap_or(self.deadline))
            }
            None => (flight.since, self.deadline),
        };
        let waited = since.elapsed();
        (waited > deadline).then_some((waited, deadline))
    }

    pub(super) fn deadline_error(
        &self,
        progress: &Progress,
        flight: &InFlight,
        waited: Duration,
        deadline: Duration,
    ) -> RunError {
        let keys: Vec<&str> = self.schedule.wiring().stages[flight.id.0]
            .outputs
            .iter()
            .map(|out| out.local.as_str())
            .collect();
        let unit = flight
            .host
            .as_ref()
            .and_then(|host| host.units.get(host.cell.lock().finished.len()).cloned());
        RunError::Deadline {
            step: progress.env.step,
            stage: self.name(flight.id.0).to_owned(),
            rows: describe_rows(unit.as_ref().unwrap_or(&flight.input)),
            waited_s: waited.as_secs_f64(),
            deadline_s: deadline.as_secs_f64(),
            awaited: if keys.is_empty() {
                "its end".to_owned()
            } else {
                keys.join(", ")
            },
        }
    }

    /// After a failure: waits for running calls, so that nothing of this step keeps running, and abandons those that do
    /// not end. A call on a worker uses the models, so the wait lasts up to its deadline; a second Ctrl-C ends the
    /// process sooner.
    pub(super) fn drain(&mut self, progress: &mut Progress) {
        let since = Instant::now();
        while let Some(event) = self.stashed.pop_front() {
            self.discard(progress, Some(event));
        }
        while !progress.in_flight.is_empty() && since.elapsed() < self.deadline {
            crossbeam_channel::select! {
                recv(self.host_events) -> event => self.discard(progress, event.ok()),
                recv(self.device_events) -> event => self.discard(progress, event.ok()),
                default(TICK) => {}
            }
            let out_of_time = since.elapsed() > GRACE;
            let late: Vec<u64> = progress
                .in_flight
                .iter()
                .filter(|(_, flight)| flight.host.is_some())
                .filter(|(_, flight)| out_of_time || self.is_late(flight).is_some())
                .map(|(call, _)| *call)
                .collect();
            late.into_iter()
                .for_each(|call| self.abandon(progress, call));
        }
        let left: Vec<u64> = progress.in_flight.keys().copied().collect();
        left.into_iter()
            .for_each(|call| self.abandon(progress, call));
    }

    pub(super) fn discard(&mut self, progress: &mut Progress, event: Option<Event>) {
        let Some(event @ (Event::Done { .. } | Event::HostDone { .. })) = event else {
            return;
        };
        let call = event.call();
        let Some(flight) = progress.in_flight.remove(&call) else {
            return;
        };
        if let Event::Done { report, result, .. } = &event {
            let outcome = SpanOutcome::of(result);
            self.note_device_call(progress, call, &flight, report, outcome);
            if matches!(result, Err(CallFailure::Panic(_))) {
                progress.panicked.push(flight.id.0);
            }
        }
        self.note_host_job(progress, &flight, false);
        if let Some(host) = flight.host {
            let stage = host.cell.lock().stage.take();
            self.restore_object(flight.id.0, stage);
        }
    }

    pub(super) fn abandon(&mut self, progress: &mut Progress, call: u64) {
        let Some(flight) = progress.in_flight.remove(&call) else {
            return;
        };
        self.note_host_job(progress, &flight, true);
        let Some(host) = &flight.host else {
            self.abandon_worker(flight.id.0);
            self.note_abandoned_call(progress, call, &flight);
            return;
        };
        let runs = {
            let mut cell = host.cell.lock();
            cell.abandoned = true;
            cell.unit_since.is_some()
        };
        if runs && let Err(error) = self.pool.replace_hung() {
            tracing::error!("cannot replace a hung host thread: {error}");
        }
        self.restore_object(flight.id.0, None);
    }

    /// Gives up the worker of `stage`, whose call did not end.
    pub(super) fn abandon_worker(&mut self, stage: usize) {
        if let Place::Group(group) = self.schedule.places()[stage] {
            self.workers[group].abandon();
        }
    }

    pub(super) fn restore_object(&mut self, stage: usize, object: Option<Box<dyn Stage>>) {
        if let Err(error) = self.return_object(stage, object) {
            tracing::error!("cannot rebuild a lost stage: {error}");
        }
    }
}
