//! The token that ends a rollout.

use std::fmt;
use std::sync::Arc;

/// Whether a rollout is to end, asked before each decoding step; cheap to clone.
#[derive(Clone)]
pub struct Cancel(Arc<dyn Fn() -> bool + Send + Sync>);

impl Cancel {
    /// Ends rollouts from the time when `is_cancelled` returns true.
    pub fn new(is_cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Cancel(Arc::new(is_cancelled))
    }

    /// Whether the rollout is to end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cancel")
    }
}

/// The same token, not merely one in the same state.
impl PartialEq for Cancel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
