//! Objects of the CUDA driver, each freed when its owner is dropped.

use std::ffi::{c_int, c_void, CStr};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute};

use crate::step::error::{check, fail, Error, Result};

/// The minimum driver version, CUDA 12.3: the first that captures kernels that overlap.
const OLDEST_DRIVER: c_int = 12_030;

/// The percentage of a multiprocessor's L1 memory that is shared memory. Kernels with different percentages
/// cannot overlap, since a multiprocessor changes the percentage only when it is idle.
const ALL_SHARED: c_int = 100;

/// The primary context of a device, which other users of CUDA in this process share.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: all threads may use the driver's contexts.
unsafe impl Send for Context {}
// SAFETY: the same as above.
unsafe impl Sync for Context {}

/// A context that is current in this thread. Dropping it makes the former context current again.
pub(crate) struct Current(PhantomData<*mut ()>);

impl Context {
    /// Returns the context of device 0.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason.
    pub(crate) fn open() -> Result<Arc<Self>> {
        // SAFETY: loading the driver runs its initializers only.
        if !unsafe { sys::is_culib_present() } {
            fail!(Unavailable, "the driver's library, libcuda, is not found");
        }
        let unavailable = |error: Error| Error::Unavailable(error.to_string());
        let mut version = 0;
        // SAFETY: writes a number.
        unsafe { check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version)) }
            .map_err(unavailable)?;
        if version < OLDEST_DRIVER {
            fail!(Unavailable, "the driver has CUDA {version}, expected {OLDEST_DRIVER} or later");
        }
        let (mut device, mut raw) = (0, null_mut());
        // SAFETY: the first call initializes the driver for the later ones; each writes its result.
        unsafe {
            check("cuInit", sys::cuInit(0)).map_err(unavailable)?;
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, 0)).map_err(unavailable)?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut raw, device))
                .map_err(unavailable)?;
        }
        Ok(Arc::new(Self { device, raw }))
    }

    /// Makes this context current.
    pub(crate) fn enter(&self) -> Result<Current> {
        // SAFETY: the context is retained.
        unsafe { check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(self.raw)) }?;
        Ok(Current(PhantomData))
    }

    /// Returns the compute capability of the device: 90 for 9.0.
    pub(crate) fn capability(&self) -> Result<usize> {
        let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        Ok(10 * self.attribute(major)? + self.attribute(minor)?)
    }

    pub(crate) fn attribute(&self, attribute: CUdevice_attribute) -> Result<usize> {
        let mut value = 0;
        // SAFETY: writes a number.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(usize::try_from(value).unwrap_or(0))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut before = null_mut();
        // SAFETY: this thread pushed the context once. The guard is not `Send`, so it stays in this thread.
        unsafe { sys::cuCtxPopCurrent_v2(&mut before) };
    }
}

/// Device memory, for callers that do not allocate it with another library.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Memory {
    /// Allocates zeroed memory.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.enter()?;
        let bytes = bytes.max(16);
        let mut address = 0;
        // SAFETY: writes an address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        let memory = Self { context: context.clone(), address, bytes };
        // SAFETY: the memory has that many bytes. Other streams do not wait for the null stream's work.
        unsafe {
            check("cuMemsetD8", sys::cuMemsetD8_v2(address, 0, bytes))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(null_mut()))?;
        }
        Ok(memory)
    }

    /// Returns the address of the memory.
    pub fn address(&self) -> crate::Address {
        crate::Address(self.address)
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies bytes to the offset `at` of this memory, and waits.
    ///
    /// # Errors
    /// [`Error::Driver`] if they do not fit, or if the copy fails.
    pub fn write(&mut self, at: usize, from: &[u8]) -> Result<()> {
        let to = self.place(at, from.len())?;
        let _current = self.context.enter()?;
        // SAFETY: both ranges have that many bytes. The copy may continue after the first call returns, and
        // other streams do not wait for it.
        unsafe {
            check("cuMemcpyHtoD", sys::cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len()))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(null_mut()))
        }
    }

    /// Copies bytes from the offset `at` of this memory, and waits.
    ///
    /// # Errors
    /// [`Error::Driver`] if the memory has too few bytes, or if the copy fails.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        let from = self.place(at, to.len())?;
        let _current = self.context.enter()?;
        // SAFETY: both ranges have that many bytes.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len())
        })
    }

    fn place(&self, at: usize, bytes: usize) -> Result<u64> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + at as u64),
            _ => Err(Error::Driver {
                call: "a copy",
                reason: format!("{bytes} bytes at {at} are outside of {} bytes", self.bytes),
            }),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: allocated once; its users have waited for the device.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Page-locked host memory, for asynchronous copies from and to the device.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    context: Arc<Context>,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references read only.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed memory.
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _current = context.enter()?;
        let bytes = bytes.max(16);
        let mut data: *mut c_void = null_mut();
        // SAFETY: writes an address, whose bytes are then set.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut data, bytes, 0))?;
            data.cast::<u8>().write_bytes(0, bytes);
        }
        Ok(Self { context: context.clone(), data: data.cast(), bytes })
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are allocated and initialized. While the device writes them, the owner is
        // borrowed as `&mut` until the step has ended.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: allocated once; its users have waited for the device.
            unsafe { sys::cuMemFreeHost(self.data.cast()) };
        }
    }
}

/// A CUDA stream that does not synchronize with the null stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: sys::CUstream,
}

// SAFETY: all threads may use the driver's streams.
unsafe impl Send for Stream {}
// SAFETY: the same as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let _current = context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes a handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Waits until all work on the stream is complete.
    pub(crate) fn wait(&self) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created once.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A loaded cubin.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: all threads may use the driver's modules.
unsafe impl Send for Module {}
// SAFETY: the same as above.
unsafe impl Sync for Module {}

/// A kernel of a module. It keeps the module alive.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    _module: Arc<Module>,
    pub(crate) raw: sys::CUfunction,
}

// SAFETY: all threads may use the driver's functions.
unsafe impl Send for Kernel {}
// SAFETY: the same as above.
unsafe impl Sync for Kernel {}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Arc<Self>> {
        let _current = context.enter()?;
        let mut raw = null_mut();
        // SAFETY: the bytes are a complete cubin, and the driver copies them.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast())
        })?;
        Ok(Arc::new(Self { context: context.clone(), raw }))
    }

    /// Returns a kernel that may use up to `shared` bytes of dynamic shared memory.
    pub(crate) fn kernel(self: &Arc<Self>, name: &CStr, shared: usize) -> Result<Kernel> {
        let _current = self.context.enter()?;
        let mut raw = null_mut();
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let carveout =
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let shared = c_int::try_from(shared).unwrap_or(c_int::MAX);
        // SAFETY: the module is live, the name ends with a zero, and the first call writes the handle that
        // the others use.
        unsafe {
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()),
            )?;
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(raw, most, shared))?;
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(raw, carveout, ALL_SHARED))?;
        }
        Ok(Kernel { _module: self.clone(), raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: loaded once; its users have waited for the device.
            unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}
