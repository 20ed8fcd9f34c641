//! Between cubecl's store of compiled kernels and the files.
//!
//! cubecl looks for a kernel in its store before it compiles one, and puts there what it compiled. Left alone it keeps the
//! store in a database whose keys say nothing of compiler and driver, and whose pages have no check. Here it keeps the
//! store in memory; [`open`] fills it with the files that fit, [`prepare`] with kernels that are compiled side by side,
//! and [`save`] writes what has come in besides.

use std::collections::HashSet;
use std::ffi::c_char;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use cubecl::CubeKernel;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::environment::{CacheOption, Namespace, Store, StoreOptions, namespaces};
use cubecl::prelude::KernelMetadata;
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Place;
use super::files::{Files, Kernel};
use super::jobs::{self, Noted};
use super::made_with::{MadeWith, compiler, executable, hash};
use crate::kernels::cuda::launch::CudaKernel;

/// A path below a file: no folder can be made there, so that cubecl's store stays in memory.
const IN_MEMORY: &str = "/dev/null/verl";
/// Threads that compile ahead at most; each holds some hundred megabytes.
const MOST_THREADS: usize = 12;
/// Headers that stand for all of a toolkit.
const HEADERS: [&str; 5] = [
    "cuda.h",
    "cuda_bf16.h",
    "cuda_bf16.hpp",
    "cuda_fp16.h",
    "cuda_fp16.hpp",
];

/// Under what cubecl keeps a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    id: u128,
    build_id: u128,
}

/// What cubecl keeps of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Compiled {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
    #[serde(default)]
    io: Option<Vec<Value>>,
}

type Kernels = Store<Key, Compiled>;

/// The cache of one sort of device.
#[derive(Clone)]
struct Opened {
    capability: u32,
    toolkit: PathBuf,
    root: PathBuf,
    files: Files,
    build_id: u128,
    /// Kernels that lay in the files.
    loaded: HashSet<u128>,
    /// Kernels that are in the store and need not be written.
    kept: HashSet<u128>,
}

#[derive(Default)]
struct State {
    /// cubecl's store is switched on, and in memory.
    active: bool,
    opened: Option<Opened>,
    job: Option<String>,
    noted: HashSet<Noted>,
    /// The disk refused once.
    refused: bool,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Whether launches are noted.
static NOTING: AtomicBool = AtomicBool::new(false);

fn with_state<T>(act: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, Option<State>> =
        STATE.lock().unwrap_or_else(PoisonError::into_inner);
    act(state.get_or_insert_default())
}

/// Switches cubecl's store on, where this build of it has one. To be called before anything else of cubecl.
pub(crate) fn activate() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if !matches!(Place::of_environment(), Place::Folder(_)) {
            return;
        }
        let settings = CubeClRuntimeConfig::from_current_dir().override_from_env();
        let Some(settings) = with_store(&settings) else {
            return;
        };
        if CubeClRuntimeConfig::try_set(settings) {
            with_state(|state| state.active = true);
        } else {
            tracing::debug!("kernels are not kept: cubecl has its settings already");
        }
    });
}

/// The settings with the store in memory; none where this build of cubecl has no store, or someone has switched it on.
fn with_store(settings: &CubeClRuntimeConfig) -> Option<CubeClRuntimeConfig> {
    let mut value = serde_json::to_value(settings).ok()?;
    let cache = value.get_mut("compilation")?.get_mut("cache")?;
    if *cache == json!(true) {
        return None;
    }
    *cache = json!(true);
    *value.get_mut("environment")?.get_mut("path")? = json!({ "directory": IN_MEMORY });
    serde_json::from_value(value).ok()
}

fn namespace(capability: u32) -> Namespace {
    Namespace::scoped("cuda", format!("ptx_sm{capability}-cpp"))
}

fn store(capability: u32, cache: CacheOption) -> Kernels {
    let options = StoreOptions::new().storage(namespace(capability));
    Store::new(options.cache(cache))
}

/// Fills the store with the files of a device that has just compiled a kernel.
pub(crate) fn open(capability: u32, driver: Option<&str>, toolkit: &Path) {
    let Place::Folder(root) = Place::of_environment() else {
        return;
    };
    with_state(|state| {
        if !state.active || state.opened.is_some() {
            return;
        }
        let mut example = None;
        store(capability, CacheOption::Eager).for_each(|key, compiled| {
            example = Some((key.build_id, compiler(&text(compiled))));
        });
        let Some((build_id, compiler)) = example else {
            tracing::debug!("kernels are not kept: cubecl has put none into its store");
            return;
        };
        let program = std::env::current_exe().and_then(|path| executable(&path));
        let Ok(executable) = program else {
            tracing::debug!("kernels are not kept: the executable cannot be read");
            return;
        };
        let made = MadeWith {
            capability,
            compiler,
            driver: driver.unwrap_or("unknown").to_owned(),
            headers: headers(toolkit),
            executable,
        };
        let mut opened = Opened {
            capability,
            toolkit: toolkit.to_owned(),
            files: Files::new(&root, &made),
            root,
            build_id,
            loaded: HashSet::new(),
            kept: HashSet::new(),
        };
        opened.fill();
        state.opened = Some(opened);
    });
}

impl Opened {
    fn fill(&mut self) {
        let mut store = store(self.capability, CacheOption::Lazy);
        for kernel in self.files.load() {
            let Some((key, compiled)) = from_file(kernel) else {
                continue;
            };
            if key.build_id == self.build_id {
                self.loaded.insert(key.id);
                self.kept.insert(key.id);
                // Where it was compiled in the meantime, that one stays.
                let _ = store.insert(key, compiled);
            }
        }
    }

    /// Writes what is in the store and not in the files.
    fn write(&mut self) -> io::Result<()> {
        let name = namespace(self.capability);
        let all = namespaces()
            .into_iter()
            .find(|summary| summary.namespace == name.as_str());
        // The entries are large, so they are not read for nothing.
        if all.is_some_and(|all| all.entries == self.kept.len() as u64) {
            return Ok(());
        }
        let mut written = Ok(());
        store(self.capability, CacheOption::Eager).for_each(|key, compiled| {
            if written.is_err() || self.kept.contains(&key.id) {
                return;
            }
            written = match to_file(key, compiled) {
                Some(kernel) => self.files.add(&kernel).map(drop),
                None => Ok(()),
            };
            self.kept.insert(key.id);
        });
        written
    }

    /// Compiles kernels on threads and puts them into the store.
    fn compile(&self, kernels: &[CudaKernel]) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut store = store(self.capability, CacheOption::Lazy);
            while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                let key = Key {
                    id: kernel.id().stable_hash(),
                    build_id: self.build_id,
                };
                if let Some(compiled) = self.compiled(kernel) {
                    // The device may have been faster.
                    let _ = store.insert(key, compiled);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads.min(MOST_THREADS).min(kernels.len()) {
                scope.spawn(work);
            }
        });
    }

    /// A kernel, compiled as cubecl would; none where the compiler refuses, which the launch will tell.
    fn compiled(&self, kernel: &CudaKernel) -> Option<Compiled> {
        let source = kernel.source()?;
        let suffix = if self.capability >= 90 { "a" } else { "" };
        let include = self.toolkit.join("include");
        let mut include_paths = vec![include.display().to_string()];
        let further = include.join("cccl");
        if further.exists() {
            include_paths.push(further.display().to_string());
        }
        let options = CompileOptions {
            include_paths,
            options: vec![
                format!("--gpu-architecture=sm_{}{suffix}", self.capability),
                "-lineinfo".to_owned(),
            ],
            ..CompileOptions::default()
        };
        let ptx = compile_ptx_with_opts(source.source, options).ok()?;
        Some(Compiled {
            entrypoint_name: source.entrypoint_name,
            shared_mem_bytes: 0,
            ptx: ptx.as_bytes()?.iter().map(|b| *b as c_char).collect(),
            io: None,
        })
    }
}

/// See [`super::prepare`].
pub(super) fn prepare(job: &str) {
    let ahead = with_state(|state| {
        state.job = Some(job.to_owned());
        NOTING.store(true, Ordering::Relaxed);
        state.opened.clone()
    });
    let Some(opened) = ahead else {
        return;
    };
    let noted = jobs::read(&opened.root, job);
    let missing: Vec<CudaKernel> = noted
        .iter()
        .filter_map(CudaKernel::of_note)
        .filter(|kernel| !opened.loaded.contains(&kernel.id().stable_hash()))
        .collect();
    if missing.is_empty() {
        return;
    }
    let started = std::thread::Builder::new()
        .name("kernels".to_owned())
        .spawn(move || opened.compile(&missing));
    if let Err(error) = started {
        tracing::debug!("kernels are compiled when they are launched: {error}");
    }
}

/// Notes a launch for the job, while launches are counted.
pub(crate) fn note(kernel: impl FnOnce() -> Option<Noted>) {
    if NOTING.load(Ordering::Relaxed)
        && let Some(kernel) = kernel()
    {
        with_state(|state| {
            state.noted.insert(kernel);
        });
    }
}

/// See [`super::save`].
pub(super) fn save() {
    with_state(|state| {
        let Some(opened) = state.opened.as_mut().filter(|_| !state.refused) else {
            return;
        };
        let mut noted: Vec<Noted> = state.noted.iter().cloned().collect();
        noted.sort_by(|a, b| {
            (&a.file, &a.entry, &a.definitions).cmp(&(&b.file, &b.entry, &b.definitions))
        });
        let written = opened.write().and_then(|()| match &state.job {
            Some(job) if !noted.is_empty() => jobs::add(&opened.root, job, &noted),
            _ => Ok(()),
        });
        if let Err(error) = written {
            state.refused = true;
            tracing::warn!(
                "compiled kernels are not kept: `{}` cannot be written: {error}; VERL_CACHE_DIR names another folder, \
                 or `off`",
                opened.root.display()
            );
        }
    });
}

/// Whether a kernel lay in the files. Launches are noted no longer.
pub(super) fn is_found(id: u128) -> bool {
    NOTING.store(false, Ordering::Relaxed);
    with_state(|state| {
        let opened = state.opened.as_ref();
        opened.is_some_and(|opened| opened.loaded.contains(&id))
    })
}

/// Where kernels are kept, or why they are not.
pub(super) fn cache() -> String {
    let opened = with_state(|state| {
        state
            .opened
            .as_ref()
            .map(|opened| opened.files.folder().to_owned())
    });
    match (opened, Place::of_environment()) {
        (Some(folder), _) => folder.display().to_string(),
        (None, Place::Folder(_)) => "none: cubecl keeps its own".to_owned(),
        (None, place) => place.to_string(),
    }
}

fn headers(toolkit: &Path) -> String {
    let mut all = Vec::new();
    for name in HEADERS {
        all.extend(std::fs::read(toolkit.join("include").join(name)).unwrap_or_default());
        all.push(0);
    }
    hash(&all)
}

fn text(compiled: &Compiled) -> String {
    let bytes: Vec<u8> = compiled.ptx.iter().map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn to_file(key: &Key, compiled: &Compiled) -> Option<Kernel> {
    let ptx = compiled.ptx.iter().map(|c| *c as u8).collect();
    Some(Kernel {
        id: format!("{:032x}", key.id),
        build: format!("{:032x}", key.build_id),
        entry: compiled.entrypoint_name.clone(),
        shared: compiled.shared_mem_bytes,
        io: compiled.io.clone(),
        ptx: String::from_utf8(ptx).ok()?,
    })
}

fn from_file(kernel: Kernel) -> Option<(Key, Compiled)> {
    let number = |text: &str| u128::from_str_radix(text, 16).ok();
    let key = Key {
        id: number(&kernel.id)?,
        build_id: number(&kernel.build)?,
    };
    let compiled = Compiled {
        entrypoint_name: kernel.entry,
        shared_mem_bytes: kernel.shared,
        ptx: kernel.ptx.bytes().map(|b| b as c_char).collect(),
        io: kernel.io,
    };
    Some((key, compiled))
}
