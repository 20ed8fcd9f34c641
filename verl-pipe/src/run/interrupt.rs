//! Ctrl-C: the first asks the run to end, the second ends the process.

use crate::stage::CancelToken;

/// Exit status of a run that was cancelled: 128 and the number of SIGINT.
pub const CANCELLED_STATUS: u8 = 130;

/// From now on Ctrl-C cancels `token`; a second one ends the process at once with [`CANCELLED_STATUS`].
///
/// # Errors
/// When no thread or signal handler can be had.
pub fn cancel_on_ctrl_c(token: CancelToken) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let wait = move || {
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if token.is_cancelled() {
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "the user asked twice: waiting for threads is what he does not want"
                    )]
                    std::process::exit(CANCELLED_STATUS.into());
                }
                token.cancel();
                tracing::warn!("ending the step and saving what was trained; press Ctrl-C again to leave at once");
            }
        });
    };
    std::thread::Builder::new()
        .name("ctrl-c".to_owned())
        .spawn(wait)
        .map(drop)
}
