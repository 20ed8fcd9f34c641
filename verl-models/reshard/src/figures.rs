//! Sums of a plan, and its text.

use std::fmt;

use crate::plan::{Distance, RankFigures, Transfers};

impl Transfers {
    /// Bytes sent over a distance.
    #[must_use]
    pub fn bytes_over(&self, distance: Distance) -> u64 {
        let packages = self.packages.iter();
        let own = packages.filter(|package| package.distance == distance);
        own.map(|package| package.bytes as u64).sum()
    }

    /// Bytes sent in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sent.iter().sum()
    }

    /// The largest of each figure over all ranks.
    #[must_use]
    pub fn largest(&self) -> RankFigures {
        let ranks = self.ranks.iter();
        ranks.fold(RankFigures::default(), |most, own| RankFigures {
            received: most.received.max(own.received),
            reused: most.reused.max(own.reused),
            peak: most.peak.max(own.peak),
            redundant: most.redundant.max(own.redundant),
        })
    }
}

/// A table of the ranks, and the sums by distance.
impl fmt::Display for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["received", "reused", "weights", "redundant"];
        write!(f, "{:>5}", "rank")?;
        for name in header {
            write!(f, " {name:>10}")?;
        }
        writeln!(f)?;
        for (rank, own) in self.ranks.iter().enumerate() {
            write!(f, "{rank:>5}")?;
            for bytes in [own.received, own.reused, own.peak, own.redundant] {
                write!(f, " {:>10}", size(bytes))?;
            }
            writeln!(f)?;
        }
        write!(
            f,
            "sent {} in {} packages of up to {}",
            size(self.bytes()),
            self.packages.len(),
            size(self.bucket_bytes as u64)
        )?;
        for (distance, text) in [
            (Distance::Device, "within a device"),
            (Distance::Host, "within a host"),
            (Distance::Network, "between hosts"),
        ] {
            let bytes = self.bytes_over(distance);
            if bytes > 0 {
                write!(f, ", {} {text}", size(bytes))?;
            }
        }
        Ok(())
    }
}

/// Bytes in a unit in which the number is short.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" || value >= 100.0 {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}
