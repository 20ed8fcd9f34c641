//! The processor and the C library: what can affect the speed of a run, or the last bits of its results.

use std::fs;
use std::path::Path;

use crate::records::Cpu;

impl Cpu {
    /// The first processor of this machine. Values that the system does not report are absent.
    pub fn here() -> Cpu {
        let files = Cpu::of_linux(Path::new("/proc/cpuinfo"), Path::new(CACHES));
        files.or(of_instruction())
    }

    /// Reads the files of Linux; all values are absent on other systems.
    fn of_linux(cpuinfo: &Path, caches: &Path) -> Cpu {
        let info = fs::read_to_string(cpuinfo).unwrap_or_default();
        let mut cpu = Cpu {
            vendor: value_of(&info, &["vendor_id", "CPU implementer"]),
            model: value_of(&info, &["model name", "CPU part"]),
            ..Cpu::default()
        };
        for index in 0..MAX_CACHES {
            let dir = caches.join(format!("index{index}"));
            let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
            let size = kib(&read("size"));
            cpu.set_cache(read("level").trim(), read("type").trim(), size);
        }
        cpu
    }

    /// Sets the size of a data cache; the first one of each level counts.
    fn set_cache(&mut self, level: &str, kind: &str, size: Option<u64>) {
        let cache = match (level, kind) {
            ("1", "Data" | "Unified") => &mut self.l1d_kib,
            ("2", "Data" | "Unified") => &mut self.l2_kib,
            ("3", "Data" | "Unified") => &mut self.l3_kib,
            _ => return,
        };
        *cache = cache.or(size);
    }

    /// Fills missing values from `other`.
    fn or(self, other: Cpu) -> Cpu {
        Cpu {
            vendor: self.vendor.or(other.vendor),
            model: self.model.or(other.model),
            l1d_kib: self.l1d_kib.or(other.l1d_kib),
            l2_kib: self.l2_kib.or(other.l2_kib),
            l3_kib: self.l3_kib.or(other.l3_kib),
        }
    }
}

/// Where Linux describes the caches of the first processor, one folder each.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";
/// Number of cache folders that are read; processors have four or five.
const MAX_CACHES: usize = 8;

/// The value of the first of `keys` in the lines `key : value` of `/proc/cpuinfo`.
fn value_of(cpuinfo: &str, keys: &[&str]) -> Option<String> {
    let pairs = || cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let value = |key: &&str| {
        let found = pairs().find(|(name, _)| name.trim() == *key);
        found.and_then(|(_, value)| words(value))
    };
    keys.iter().find_map(value)
}

/// The text with single spaces between words; `None` if it has no words.
fn words(text: &str) -> Option<String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// Size of a cache as Linux writes it, such as `48K` (KiB).
fn kib(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = match text.strip_suffix('M') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('K')?, 1),
    };
    let size = number.parse::<u64>().ok()?.checked_mul(unit)?;
    (size > 0).then_some(size)
}

/// What the processor reports through the instruction `cpuid`.
#[cfg(target_arch = "x86_64")]
fn of_instruction() -> Cpu {
    use raw_cpuid::{CacheType, CpuId};
    let id = CpuId::new();
    let vendor = id.get_vendor_info();
    let model = id.get_processor_brand_string();
    let mut cpu = Cpu {
        vendor: vendor.and_then(|vendor| words(vendor.as_str())),
        model: model.and_then(|model| words(model.as_str())),
        ..Cpu::default()
    };
    for cache in id.get_cache_parameters().into_iter().flatten() {
        let kind = match cache.cache_type() {
            CacheType::Data => "Data",
            CacheType::Unified => "Unified",
            _ => continue,
        };
        let line = cache.coherency_line_size() * cache.physical_line_partitions();
        let bytes = (line as u64) * (cache.associativity() as u64) * (cache.sets() as u64);
        let size = Some(bytes / 1024).filter(|size| *size > 0);
        cpu.set_cache(&cache.level().to_string(), kind, size);
    }
    cpu
}

/// Other processors have no such instruction.
#[cfg(not(target_arch = "x86_64"))]
fn of_instruction() -> Cpu {
    Cpu::default()
}

/// What [`c_library`] returns if the library is not glibc.
pub const OTHER_LIBRARY: &str = "other";

/// Name and version of the C library, such as `glibc 2.36`.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn c_library() -> String {
    use std::ffi::CStr;
    #[expect(
        unsafe_code,
        reason = "glibc returns a pointer to a constant string that ends in NUL, and never null"
    )]
    let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc {}", version.to_string_lossy())
}

/// Name and version of the C library; unknown for libraries other than glibc.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn c_library() -> String {
    OTHER_LIBRARY.to_owned()
}

/// Processor features that select kernels and functions of the C library.
pub fn processor_features() -> Vec<&'static str> {
    let known = known_features().into_iter();
    known
        .filter_map(|(feature, found)| found.then_some(feature))
        .collect()
}

/// Features that select kernels, and whether the processor has them.
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

/// Features that select kernels, and whether the processor has them.
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

/// No kernels depend on features of other processors.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn known_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From an Intel Xeon, shortened.
    const XEON: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n\
        model name\t: Intel(R) Xeon(R)  Platinum 8480C\ncache size\t: 107520 KB\n\n\
        processor\t: 1\nvendor_id\t: Another\n";
    /// From an Arm Neoverse, shortened.
    const NEOVERSE: &str =
        "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";

    #[test]
    fn the_first_processor_of_cpuinfo_is_read() {
        let read = |text| {
            let vendor = value_of(text, &["vendor_id", "CPU implementer"]);
            let model = value_of(text, &["model name", "CPU part"]);
            (vendor.unwrap_or_default(), model.unwrap_or_default())
        };
        let pair = |vendor: &str, model: &str| (vendor.to_owned(), model.to_owned());
        assert_eq!(
            read(XEON),
            pair("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480C")
        );
        assert_eq!(read(NEOVERSE), pair("0x41", "0xd40"));
        assert_eq!(read("no colon\nmodel name\t: \n"), pair("", ""));
    }

    #[test]
    fn cache_sizes_are_read_in_kib() {
        let sizes = ["48K\n", "480M", "48", "K", "0K", "-1K", ""].map(kib);
        let expected = [Some(48), Some(480 * 1024), None, None, None, None, None];
        assert_eq!(sizes, expected);
    }

    #[test]
    fn data_caches_count_and_instruction_caches_do_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let caches = [
            ("1", "Instruction", "64K"),
            ("1", "Data", "48K"),
            ("2", "Unified", "2048K"),
            ("3", "Unified", "rubbish"),
        ];
        for (index, (level, kind, size)) in caches.into_iter().enumerate() {
            let cache = dir.path().join(format!("index{index}"));
            fs::create_dir(&cache).expect("a folder");
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(cache.join(name), format!("{text}\n")).expect("a file");
            }
        }
        let cpuinfo = dir.path().join("cpuinfo");
        fs::write(&cpuinfo, XEON).expect("a file");
        let read = Cpu::of_linux(&cpuinfo, dir.path());
        let expected = Cpu {
            vendor: Some("GenuineIntel".to_owned()),
            model: Some("Intel(R) Xeon(R) Platinum 8480C".to_owned()),
            l1d_kib: Some(48),
            l2_kib: Some(2048),
            l3_kib: None,
        };
        assert_eq!(read, expected);
        let nothing = Cpu::of_linux(&dir.path().join("none"), &dir.path().join("none"));
        assert_eq!(nothing, Cpu::default());
        assert_eq!(nothing.or(read.clone()), read);
    }

    #[test]
    fn this_processor_is_plausible_or_unknown() {
        for cpu in [Cpu::here(), of_instruction()] {
            let texts = [&cpu.vendor, &cpu.model];
            assert!(
                texts
                    .into_iter()
                    .flatten()
                    .all(|text| !text.trim().is_empty()),
                "{cpu:?}"
            );
            let within = |size: Option<u64>, least, most| {
                assert!(
                    size.is_none_or(|size| (least..=most).contains(&size)),
                    "{cpu:?}"
                );
            };
            within(cpu.l1d_kib, 4, 1 << 10);
            within(cpu.l2_kib, 32, 1 << 20);
            within(cpu.l3_kib, 128, 1 << 22);
        }
    }

    #[test]
    fn the_c_library_has_a_name() {
        let name = c_library();
        match cfg!(all(target_os = "linux", target_env = "gnu")) {
            true => {
                let version = name.strip_prefix("glibc ").expect("glibc");
                assert!(version.starts_with("2."), "{name}");
            }
            false => assert_eq!(name, OTHER_LIBRARY),
        }
    }
}
