//! What of the processor decides the last bits of results.

/// Features of the processor that decide which kernels run, and with them the last bits of results.
pub(crate) fn processor_features() -> Vec<&'static str> {
    let known = known_features().into_iter();
    known
        .filter_map(|(feature, found)| found.then_some(feature))
        .collect()
}

/// Features that kernels are chosen by, and whether the processor has them.
#[cfg(target_arch = "x86_64")]
fn known_features() -> Vec<(&'static str, bool)> {
    use std::arch::is_x86_feature_detected;
    vec![
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ]
}

/// Features that kernels are chosen by, and whether the processor has them.
#[cfg(target_arch = "aarch64")]
fn known_features() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected;
    vec![
        ("neon", is_aarch64_feature_detected!("neon")),
        ("fp16", is_aarch64_feature_detected!("fp16")),
        ("dotprod", is_aarch64_feature_detected!("dotprod")),
        ("sve", is_aarch64_feature_detected!("sve")),
    ]
}

/// No kernels are chosen by features of other processors.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn known_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}
