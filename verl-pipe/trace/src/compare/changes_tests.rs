//! Which changes are listed, and for which of them equal bits are expected.

use verl_run::records::Cpu;
use verl_words::resource::CpuKernels;

use super::*;
use serde_json::json;

fn conditions(settings: Value) -> Conditions {
    let text = |text: &str| Some(text.to_owned());
    let kernels = CpuKernels {
        registers: text("avx512"),
        sums: text("fixed-1"),
    };
    Conditions {
        format: 1,
        plan_hash: "a".repeat(64),
        settings,
        machine: Machine {
            os: "linux".to_owned(),
            arch: "x86_64".to_owned(),
            processor: ["avx2", "avx512f", "fma"].map(str::to_owned).to_vec(),
            cpu: Cpu {
                vendor: text("GenuineIntel"),
                model: text("Xeon"),
                l1d_kib: Some(48),
                l2_kib: Some(2048),
                l3_kib: None,
            },
            c_library: text("glibc 2.36"),
            threads: 8,
            ..Machine::here("cpu", kernels)
        },
        stages: Vec::new(),
    }
}

/// On an AMD processor without AVX-512, with other caches and half the threads.
fn on_amd(now: &mut Conditions) {
    let machine = &mut now.machine;
    machine.processor = ["avx", "avx2", "fma"].map(str::to_owned).to_vec();
    machine.cpu.vendor = Some("AuthenticAMD".to_owned());
    machine.cpu.model = Some("EPYC".to_owned());
    machine.cpu.l1d_kib = Some(32);
    machine.cpu.l2_kib = Some(512);
    machine.cpu.l3_kib = Some(16384);
    machine.cpu_kernels.registers = Some("avx2".to_owned());
    machine.threads = 4;
}

#[test]
fn settings_are_compared_by_name() {
    let first = json!({"run": {"seed": 1}, "stages": [{"name": "x", "t": 1}, {"name": "y"}]});
    let second = json!({"run": {"seed": 1.0}, "stages": [{"name": "y"}, {"name": "x", "t": 0.5}]});
    let found: Vec<Change> = changed(&first, &second).collect();
    let expected = Change {
        name: "stages.x.t".to_owned(),
        recorded: json!(1),
        now: json!(0.5),
    };
    assert_eq!(found, [expected]);
}

#[test]
fn settings_that_affect_no_number_are_ignored() {
    let settings = |dir: &str, every: u64, seed: u64| json!({"run": {"dir": dir, "seed": seed}, "trace": {"every": every}});
    let recorded = conditions(settings("a", 1, 5));
    let same = Changes::between(&recorded, &conditions(settings("b", 2, 5)));
    assert!(same.settings.is_empty() && same.plan.is_none() && same.machine.is_empty());
    assert!(same.repeats_host_bits() && same.repeats_model_bits());
    let mut now = conditions(settings("a", 1, 6));
    now.plan_hash = "b".repeat(64);
    let text = Changes::between(&recorded, &now).to_string();
    let expected = "another plan: aaaaaaaaaaaa when recorded, bbbbbbbbbbbb now\n\
                    setting run.seed: 5 when recorded, 6 now\n";
    assert_eq!(text, expected);
}

#[test]
fn equal_bits_are_expected_by_these_rules() {
    let recorded = conditions(json!({"models": {"actor": {"dtype": "f32"}}}));
    let check = |change: fn(&mut Conditions), host: bool, models: bool, why: &str| {
        let mut now = recorded.clone();
        change(&mut now);
        let changes = Changes::between(&recorded, &now);
        assert_eq!(changes.repeats_host_bits(), host, "{changes}");
        assert_eq!(changes.repeats_model_bits(), models, "{changes}");
        let text = changes.to_string();
        assert_eq!(text.contains("are not expected"), !models, "{text}");
        assert!(text.contains(why), "{text}");
    };
    let expected = |change, what: &str| {
        let line = format!(
            "\nanother {what}: equal bits are expected on the CPU, because sums do not depend on it\n"
        );
        check(change, true, true, &line);
    };
    // Changes that affect no bits.
    check(|_| {}, true, true, "");
    expected(
        |now| now.machine.threads = 11,
        "number of threads (8 when recorded, 11 now)",
    );
    expected(
        |now| now.machine.cpu_kernels.registers = Some("plain".to_owned()),
        "width of registers (\"avx512\" when recorded, \"plain\" now)",
    );
    expected(
        |now| now.machine.cpu.vendor = Some("Other".to_owned()),
        "processor",
    );
    expected(
        |now| now.machine.cpu.model = Some("EPYC".to_owned()),
        "processor (\"Xeon\" when recorded, \"EPYC\" now)",
    );
    expected(|now| now.machine.cpu.l1d_kib = Some(32), "processor");
    expected(|now| now.machine.cpu.l2_kib = Some(512), "processor");
    expected(
        |now| now.machine.processor.push("f16c".to_owned()),
        "processor",
    );
    check(on_amd, true, true, "equal bits are expected");
    // Changes that affect only the bits of models.
    check(
        |now| now.machine.device = "cuda:0".to_owned(),
        true,
        false,
        "machine device: \"cpu\" when recorded, \"cuda:0\" now\n",
    );
    check(
        |now| now.settings["models"]["actor"]["dtype"] = "bf16".into(),
        true,
        false,
        "setting models.actor.dtype: ",
    );
    check(
        |now| now.machine.cpu_kernels.sums = None,
        true,
        false,
        "(a model kind does not declare that its sums are the same on every processor)",
    );
    // Changes that affect all bits.
    check(
        |now| now.machine.cpu_kernels.sums = Some("fixed-2".to_owned()),
        false,
        false,
        "(kernels add in another order: `fixed-1` when recorded, `fixed-2` now)",
    );
    check(
        |now| now.machine.arch = "aarch64".to_owned(),
        false,
        false,
        "(another processor architecture)",
    );
    check(
        |now| now.machine.os = "macos".to_owned(),
        false,
        false,
        "(another operating system)",
    );
    check(
        |now| now.machine.optimised ^= true,
        false,
        false,
        "(another build profile)",
    );
    check(
        |now| now.machine.c_library = Some("glibc 2.41".to_owned()),
        false,
        false,
        "(another C library, which computes some exponentials and logarithms)",
    );
    for missing in ["avx2", "fma"] {
        let mut now = recorded.clone();
        now.machine.processor.retain(|feature| feature != missing);
        for [then, now] in [[&recorded, &now], [&now, &recorded]] {
            let changes = Changes::between(then, now);
            assert!(!changes.repeats_host_bits() && !changes.repeats_model_bits());
            let why = "(a processor without AVX2 and FMA, where";
            assert!(changes.to_string().contains(why), "{changes}");
        }
    }
    // A version that computes differently declares other sums.
    let version = |now: &mut Conditions| now.machine.verl = "9.9.9".to_owned();
    check(version, true, true, "machine verl: ");
}

#[test]
fn differences_that_affect_no_bits_are_marked() {
    let recorded = conditions(json!({}));
    let mut now = recorded.clone();
    on_amd(&mut now);
    let text = Changes::between(&recorded, &now).to_string();
    let lines: Vec<&str> = text.lines().collect();
    let (last, parts) = lines.split_last().expect("lines");
    assert_eq!(
        *last,
        "another processor (\"Xeon\" when recorded, \"EPYC\" now), another width of registers (\"avx512\" when \
         recorded, \"avx2\" now) and another number of threads (8 when recorded, 4 now): equal bits are expected on \
         the CPU, because sums do not depend on them"
    );
    // The size of the third cache was not recorded.
    let names = [
        "cpu.l1d_kib",
        "cpu.l2_kib",
        "cpu.model",
        "cpu.vendor",
        "cpu_kernels.registers",
        "processor",
        "threads",
    ];
    assert_eq!(parts.len(), names.len(), "{text}");
    for (line, name) in parts.iter().zip(names) {
        let start = format!("machine {name}: ");
        assert!(
            line.starts_with(&start) && line.ends_with(" (affects no bits)"),
            "{line}"
        );
    }
    // If equal bits are not expected for another reason, these differences are not marked.
    now.machine.optimised ^= true;
    let text = Changes::between(&recorded, &now).to_string();
    assert!(
        !text.contains("affects no bits") && !text.contains("are expected"),
        "{text}"
    );
}

#[test]
fn models_without_declared_sums_repeat_only_on_the_same_processor() {
    let mut recorded = conditions(json!({}));
    recorded.machine.cpu_kernels = CpuKernels::default();
    let mut now = recorded.clone();
    now.machine.threads = 4;
    assert!(Changes::between(&recorded, &now).repeats_model_bits());
    now.machine.cpu.l2_kib = Some(512);
    let changes = Changes::between(&recorded, &now);
    assert!(changes.repeats_host_bits() && !changes.repeats_model_bits());
}

#[test]
fn equal_bits_are_not_expected_on_another_processor_with_an_unknown_c_library() {
    let mut recorded = conditions(json!({}));
    recorded.machine.c_library = Some(OTHER_LIBRARY.to_owned());
    assert!(Changes::between(&recorded, &recorded).repeats_model_bits());
    let mut now = recorded.clone();
    on_amd(&mut now);
    let changes = Changes::between(&recorded, &now);
    assert!(!changes.repeats_host_bits());
    let why = "(another processor and an unknown version of the C library";
    assert!(changes.to_string().contains(why), "{changes}");
}

#[test]
fn equal_bits_are_not_expected_for_a_trace_of_an_older_version() {
    let now = conditions(json!({}));
    let mut old = serde_json::to_value(&now).expect("JSON");
    let machine = old["machine"].as_object_mut().expect("an object");
    for part in ["cpu", "cpu_kernels", "c_library"] {
        assert!(machine.remove(part).is_some(), "{part}");
    }
    let old: Conditions = serde_json::from_value(old).expect("conditions");
    assert_eq!(old.machine.cpu, Cpu::default());
    let changes = Changes::between(&old, &now);
    assert!(!changes.repeats_host_bits() && !changes.repeats_model_bits());
    assert_eq!(
        changes.to_string(),
        "machine c_library: not recorded, \"glibc 2.36\" now\n\
         machine cpu_kernels.registers: not recorded, \"avx512\" now\n\
         machine cpu_kernels.sums: not recorded, \"fixed-1\" now\n\
         equal bits are not expected (the recording does not state its C library, which computes some exponentials \
         and logarithms; the recording does not state the order in which its kernels add): floats are compared \
         within their tolerance; a token or another choice that differs may come from rounding\n"
    );
}
