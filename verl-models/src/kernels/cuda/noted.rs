//! Kernels by name, so that those that were launched once can be compiled before they are launched again.

use super::launch::{CudaKernel, Source};
use crate::kernel_cache::Noted;

/// Every file that kernels are launched from, by name, with what stands before it.
static FILES: [(&str, Source); 16] = [
    (
        "advance.cu",
        Source::with_prefixes(ROWWISE, DRAW, include_str!("advance.cu")),
    ),
    (
        "attention_decode.cu",
        Source::new(include_str!("attention_decode.cu")),
    ),
    (
        "attention_train.cu",
        Source::new(include_str!("attention_train.cu")),
    ),
    (
        "embed.cu",
        Source::with_prefix(ROWWISE, include_str!("embed.cu")),
    ),
    (
        "gemm.cu",
        Source::with_prefix(GEMM_TILE, include_str!("gemm.cu")),
    ),
    (
        "gemm_dyn.cu",
        Source::with_prefix(GEMM_TILE, include_str!("gemm_dyn.cu")),
    ),
    (
        "gemm_skinny.cu",
        Source::new(include_str!("gemm_skinny.cu")),
    ),
    (
        "mlp.cu",
        Source::with_prefix(ROWWISE, include_str!("mlp.cu")),
    ),
    (
        "norm.cu",
        Source::with_prefix(ROWWISE, include_str!("norm.cu")),
    ),
    ("probe.cu", Source::new(include_str!("probe.cu"))),
    (
        "product_f32.cu",
        Source::new(include_str!("product_f32.cu")),
    ),
    (
        "race.cu",
        Source::with_prefixes(ROWWISE, DRAW, include_str!("race.cu")),
    ),
    ("rope.cu", Source::new(include_str!("rope.cu"))),
    (
        "sample.cu",
        Source::with_prefixes(ROWWISE, DRAW, include_str!("sample.cu")),
    ),
    ("update.cu", Source::new(include_str!("update.cu"))),
    (
        "vocab.cu",
        Source::with_prefix(ROWWISE, include_str!("vocab.cu")),
    ),
];
const ROWWISE: &str = include_str!("rowwise.cuh");
const DRAW: &str = include_str!("draw.cuh");
const GEMM_TILE: &str = include_str!("gemm_tile.cuh");

impl CudaKernel {
    /// What is needed to make the kernel again; none for a file that is not among [`FILES`].
    pub(super) fn noted(&self) -> Option<Noted> {
        let (file, _) = FILES
            .iter()
            .find(|(_, source)| source.hash == self.source.hash)?;
        Some(Noted {
            file: (*file).to_owned(),
            entry: self.entry.to_owned(),
            definitions: self.definitions.clone(),
            block: self.block,
        })
    }

    /// The kernel of a note with the present text of its file; none for a file that there is no more.
    pub fn of_note(noted: &Noted) -> Option<CudaKernel> {
        let (_, source) = FILES.iter().find(|(file, _)| *file == noted.file)?;
        Some(CudaKernel {
            source,
            // A few names for the life of the process.
            entry: noted.entry.clone().leak(),
            definitions: noted.definitions.clone(),
            block: noted.block,
        })
    }
}
