//! `etkv_memory`: bytes of a cache's buffers, and the memory budget.

use std::ffi::c_void;
use std::sync::{Arc, LazyLock};

use etkv_core::{
    fail, BudgetReport, LayerMemory, Memory, MemoryBudget, Reclaim, ReclaimClass, RecurrentMemory,
    Result,
};
use parking_lot::RwLock;

use super::boundary::{c_functions, fill_layers, out, read_grown, read_struct, room};

/// Bytes of one layer's buffers; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_layer_memory {
    struct_size: usize,
    k_allocated: u64,
    k_used: u64,
    v_allocated: u64,
    v_used: u64,
}

/// Bytes of one recurrent layer's buffers; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_recurrent_layer_memory {
    struct_size: usize,
    rows_allocated: u64,
    rows_used: u64,
    anchors_allocated: u64,
    anchors_used: u64,
}

/// Bytes of a cache's buffers; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_memory {
    struct_size: usize,
    allocated: u64,
    used: u64,
    at_capacity: u64,
    layers: *mut etkv_layer_memory,
    n_layers: usize,
    shared: u64,
    recurrent_layers: *mut etkv_recurrent_layer_memory,
    n_recurrent_layers: usize,
}

/// The size of the struct before it had `shared`.
const WITHOUT_SHARED: usize = std::mem::offset_of!(etkv_memory, shared);

/// Fills `memory`, and the structs of its layers if the caller has room for them.
///
/// # Safety
/// `memory` points to a struct as the header says.
pub(super) unsafe fn fill_memory(
    memory: *mut etkv_memory,
    find: impl FnOnce() -> Result<Memory>,
) -> Result<()> {
    // SAFETY: the caller keeps the contract above.
    let (mut filled, size) = unsafe { read_grown(memory, WITHOUT_SHARED, "memory")? };
    let found = find()?;
    let layer = |size, layer: &LayerMemory| etkv_layer_memory {
        struct_size: size,
        k_allocated: layer.k.allocated,
        k_used: layer.k.used,
        v_allocated: layer.v.allocated,
        v_used: layer.v.used,
    };
    let recurrent_layer = |size, layer: &RecurrentMemory| etkv_recurrent_layer_memory {
        struct_size: size,
        rows_allocated: layer.rows.allocated,
        rows_used: layer.rows.used,
        anchors_allocated: layer.anchors.allocated,
        anchors_used: layer.anchors.used,
    };
    // The lists of both sorts of layers are checked before either is written.
    // SAFETY: the caller keeps the contract above.
    unsafe {
        let size = room(filled.layers, filled.n_layers, found.layers.len(), "memory.layers")?;
        let recurrent_size = room(
            filled.recurrent_layers,
            filled.n_recurrent_layers,
            found.recurrent_layers.len(),
            "memory.recurrent_layers",
        )?;
        fill_layers(filled.layers, size, &found.layers, layer);
        fill_layers(
            filled.recurrent_layers,
            recurrent_size,
            &found.recurrent_layers,
            recurrent_layer,
        );
    }
    filled.allocated = found.allocated;
    filled.used = found.used;
    filled.at_capacity = found.at_capacity;
    filled.shared = found.shared;
    // SAFETY: the caller guarantees that its struct has that size.
    unsafe { memory.cast::<u8>().copy_from_nonoverlapping((&raw const filled).cast(), size) };
    Ok(())
}

/// Bytes of all caches' buffers, and their limit; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_memory_budget {
    struct_size: usize,
    limit: u64,
    held: u64,
    peak: u64,
    n_caches: usize,
}

c_functions!(
    /// Limits the bytes of all caches' buffers; 0 removes the limit.
    unsafe fn etkv_memory_budget_set(limit: u64) -> Result<()> {
        MemoryBudget::global().set_limit((limit > 0).then_some(limit));
        Ok(())
    }

    /// Fills `budget`.
    unsafe fn etkv_memory_budget_read(budget: *mut etkv_memory_budget) -> Result<()> {
        let target = out(budget, "budget")?;
        let budget = read_struct(target, "budget")?;
        let BudgetReport { limit, held, peak, caches, .. } = MemoryBudget::global().report();
        let (limit, n_caches) = (limit.unwrap_or(0), caches);
        target.write(etkv_memory_budget { limit, held, peak, n_caches, ..budget });
        Ok(())
    }
);

/// Frees memory that the host chooses. It receives the number of missing bytes and the host's pointer, and returns
/// the number of freed bytes.
#[allow(non_camel_case_types)]
pub type etkv_memory_callback = unsafe extern "C" fn(u64, *mut c_void) -> u64;

/// The callback, and the pointer that it receives.
struct Host(RwLock<Option<(etkv_memory_callback, *mut c_void)>>);

// SAFETY: the host allows calls of the callback, with its pointer, on any thread.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Reclaim for Host {
    fn reclaim(&self, bytes: u64) -> u64 {
        // Read-locked while the callback runs, so that a callback is no longer running once it has been replaced. A
        // thread never locks twice here: reservations inside a reclaimer do not call reclaimers.
        match *self.0.read() {
            // SAFETY: the host guarantees that the callback may be called with this pointer.
            Some((callback, user)) => unsafe { callback(bytes, user) },
            None => 0,
        }
    }
}

/// The reclaimer that calls the host. It is registered with the budget when the first callback is set.
static HOST: LazyLock<Arc<Host>> = LazyLock::new(|| {
    let host = Arc::new(Host(RwLock::new(None)));
    let reclaimer: Arc<dyn Reclaim> = host.clone();
    MemoryBudget::global().add_reclaimer(ReclaimClass::Host, Arc::downgrade(&reclaimer));
    host
});

c_functions!(
    /// Sets or removes the callback that may free memory when the budget is full.
    unsafe fn etkv_memory_budget_set_callback(
        callback: Option<etkv_memory_callback>,
        user: *mut c_void,
    ) -> Result<()> {
        if MemoryBudget::is_reclaiming() {
            fail!(
                Step,
                "cannot set the memory callback from inside itself; set it when the callback is over"
            );
        }
        *HOST.0.write() = callback.map(|callback| (callback, user));
        Ok(())
    }
);
