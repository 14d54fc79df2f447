//! The device on which steps run.

use std::collections::HashMap;
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use parking_lot::Mutex;

use crate::step::compile::Compiler;
use crate::step::driver::{Context, Kernel, Memory, Module, Stream};
use crate::step::error::{fail, Result};
use crate::step::launch::Limits;
use crate::step::source::Source;

/// The minimum compute capability. The kernels use instructions of Ampere.
const MIN_CAPABILITY: usize = 80;

/// Device 0 of CUDA, with its loaded kernels. Clones share the device.
#[derive(Debug, Clone)]
pub struct Device(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    modules: Mutex<HashMap<Source, Arc<Module>>>,
    compiler: Compiler,
    pub(crate) limits: Limits,
    /// Whether a kernel can begin before the previous one has ended.
    pub(crate) overlaps: bool,
    pub(crate) stream: Stream,
    pub(crate) context: Arc<Context>,
}

impl Device {
    /// Opens device 0. It uses the primary context, which it shares with other libraries of this process, and
    /// a separate stream. Compiled kernels are cached in `cubin_folder`, which is created if it does not
    /// exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) with the reason, if there is no driver with CUDA
    /// 12.3, no device of compute capability 8.0, or no compiler (libnvrtc);
    /// [`Error::Driver`](crate::Error::Driver) if the driver fails.
    pub fn open(cubin_folder: Option<&Path>) -> Result<Self> {
        let context = Context::open()?;
        let of = |attribute| context.attribute(attribute);
        let capability = context.capability()?;
        if capability < MIN_CAPABILITY {
            fail!(
                Unavailable,
                "the device has compute capability {capability}, expected {MIN_CAPABILITY} or more"
            );
        }
        let limits = Limits {
            processors: of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1),
            block_shared: of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            processor_shared: of(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
        };
        let compiler = Compiler::for_capability(capability, cubin_folder)?;
        let stream = Stream::new(&context)?;
        let overlaps = capability >= 90;
        let modules = Mutex::default();
        Ok(Self(Arc::new(Inner { modules, compiler, limits, overlaps, stream, context })))
    }

    /// Allocates zeroed memory, for callers that do not allocate it with another library.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if memory is lacking.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        Memory::new(&self.0.context, bytes)
    }

    /// Returns a kernel that may use up to `shared` bytes of dynamic shared memory.
    pub(crate) fn kernel(&self, source: Source, name: &CStr, shared: usize) -> Result<Kernel> {
        let inner = &*self.0;
        let mut modules = inner.modules.lock();
        let module = match modules.get(&source) {
            Some(module) => module.clone(),
            None => {
                let load = |cubin: &[u8]| Module::load(&inner.context, cubin);
                let text = source.text(inner.compiler.capability);
                let module = inner.compiler.load(&text, load)?;
                modules.insert(source, module.clone());
                module
            }
        };
        module.kernel(name, shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn without_cuda_there_is_a_reason() {
        match Device::open(None) {
            Ok(_) => eprintln!("skipped: there is a device"),
            Err(Error::Unavailable(reason)) => assert!(!reason.is_empty()),
            Err(error) => panic!("{error}"),
        }
    }
}
