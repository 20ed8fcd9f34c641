//! CUDA C++ on burn's stream, with burn's buffers.
//!
//! A [`Source`] is the text of a file. A [`CudaKernel`] is one entry of it with definitions that precede the text:
//! sizes and types that the compiler should know. cubecl compiles it with NVRTC at its first launch and caches it by
//! its [`KernelId`], which covers text, definitions and entry. The compiler gets the entry without the other kernels of
//! its file ([`kernel_text`](crate::kernel_text)).

#![expect(
    unsafe_code,
    reason = "a kernel can write anywhere on the device, so its launch is unsafe"
)]

use cubecl::ir::settings::Dim3;
use cubecl::ir::{UIntKind, metadata::Info};
use cubecl::prelude::{
    AddressType, Client, CubeCount, ElemType, ExecutionMode, KernelDefinition, KernelId,
    KernelMetadata, KernelSettings, Scope,
};
use cubecl::server::{Handle, KernelArguments, KernelResource, MetadataBindingInfo};
use cubecl::{CubeKernel, PrecompiledSource};

use crate::kernel_text::one_entry;

/// The text of a `.cu` file, after the texts that several of them share.
#[derive(Debug)]
pub(crate) struct Source {
    texts: [&'static str; 4],
    hash: u64,
}

impl Source {
    /// A single file.
    pub const fn new(text: &'static str) -> Self {
        Source::with_prefixes(["", "", ""], text)
    }

    /// A file after another.
    pub const fn with_prefix(prefix: &'static str, text: &'static str) -> Self {
        Source::with_prefixes([prefix, "", ""], text)
    }

    /// A file after three others.
    pub const fn with_prefixes(prefixes: [&'static str; 3], text: &'static str) -> Self {
        let [first, second, third] = prefixes;
        let mut hash = fnv(0xcbf2_9ce4_8422_2325, first.as_bytes());
        hash = fnv(hash, second.as_bytes());
        hash = fnv(hash, third.as_bytes());
        hash = fnv(hash, text.as_bytes());
        Source {
            texts: [first, second, third, text],
            hash,
        }
    }
}

/// FNV-1a, at compile time.
const fn fnv(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}

/// An entry of a source, ready to be launched.
#[derive(Debug, Clone)]
pub(crate) struct CudaKernel {
    source: &'static Source,
    entry: &'static str,
    /// Lines `#define NAME VALUE`.
    definitions: String,
    block: u32,
}

impl CudaKernel {
    /// The entry `entry` for blocks of `block` threads.
    pub fn new(source: &'static Source, entry: &'static str, block: u32) -> Self {
        CudaKernel {
            source,
            entry,
            definitions: String::new(),
            block,
        }
    }

    /// Adds a definition before the text.
    #[must_use]
    pub fn define(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        use std::fmt::Write;
        // Writing to a string cannot fail.
        let _ = writeln!(self.definitions, "#define {name} {value}");
        self
    }

    /// Launches `grid` blocks. The kernel's parameters are the buffers, in order, and then the `scalars`, if any, as
    /// one struct of 8-byte fields.
    ///
    /// # Safety
    /// Nothing checks the arguments: a kernel that gets others than it expects reads and writes anywhere in the device's
    /// memory, or never ends. The beginning of its `.cu` file states what it expects. For the entry, the caller must
    /// ensure that
    /// - `buffers` are those of its parameters, all of them and in their order, on the device of `client`;
    /// - each has at least the elements of the stated shape, of the stated type and alignment, and nobody else uses what
    ///   the kernel writes;
    /// - indices that it reads from buffers lie in the stated range;
    /// - the definitions and the fields of `scalars` are those of these shapes, all fields and in their order;
    /// - `grid` and the number of threads are as stated.
    pub unsafe fn launch(
        self,
        client: &Client,
        grid: [u32; 3],
        buffers: &[&Handle],
        scalars: Vec<u64>,
    ) {
        let buffers = buffers
            .iter()
            .map(|&handle| KernelResource::Buffer(handle.clone().binding()));
        // SAFETY: the caller ensures the same.
        unsafe { self.launch_resources(client, grid, buffers.collect(), scalars) };
    }

    /// Like [`CudaKernel::launch`], with tensor maps among the parameters.
    ///
    /// # Safety
    /// As for [`CudaKernel::launch`]; a tensor map has the stated box and swizzle.
    pub unsafe fn launch_resources(
        self,
        client: &Client,
        grid: [u32; 3],
        resources: Vec<KernelResource>,
        scalars: Vec<u64>,
    ) {
        // Without a dynamic part everything is passed by value, as the last parameter.
        let info = MetadataBindingInfo {
            dynamic_metadata_offset: scalars.len(),
            data: scalars,
        };
        let arguments = KernelArguments {
            resources,
            info,
            ..KernelArguments::default()
        };
        let count = CubeCount::Static(grid[0], grid[1], grid[2]);
        client.launch(Box::new(self), count, arguments);
    }

    fn dim(&self) -> Dim3 {
        Dim3::new_1d(self.block)
    }
}

impl KernelMetadata for CudaKernel {
    fn name(&self) -> &'static str {
        self.entry
    }

    fn id(&self) -> KernelId {
        KernelId::new::<Self>()
            .info((self.source.hash, self.entry, self.definitions.clone()))
            .cube_dim(self.dim())
    }

    fn address_type(&self) -> ElemType {
        UIntKind::U32.into()
    }
}

impl CubeKernel for CudaKernel {
    /// Only its block size is read: the text is compiled instead.
    fn define(&self) -> KernelDefinition {
        let settings = KernelSettings::new(self.dim(), ExecutionMode::Unchecked, AddressType::U32);
        KernelDefinition {
            body: Scope::root(settings.clone()),
            settings,
            info: Info::default(),
        }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        Some(PrecompiledSource {
            source: format!(
                "{}{}",
                self.definitions,
                one_entry(&self.source.texts.concat(), self.entry)
            ),
            entrypoint_name: self.entry.to_owned(),
            lang: "cuda",
        })
    }
}
