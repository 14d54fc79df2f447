//! Streams of programs.

use mlx_rs::{Device, Stream};
use parking_lot::Mutex;

use crate::error::Result;
use etkv::mlx::{unowned_stream, Mlx};

/// The stream of one program on the CPU. MLX computes each CPU stream on a separate thread, so several programs can
/// run at the same time. Programs on a GPU use the shared stream.
pub struct ProgramStream(Option<UnownedStream>);

/// A stream that belongs to no thread.
struct UnownedStream(Stream);

// SAFETY: it is used only under the lock of MLX, by one thread at a time.
unsafe impl Send for UnownedStream {}

/// Streams of dropped programs. MLX keeps a stream, and its thread, until the process ends.
static SPARE: Mutex<Vec<UnownedStream>> = Mutex::new(Vec::new());

impl ProgramStream {
    /// Returns a stream that no other program uses.
    ///
    /// # Errors
    /// [`Backend`](etkv::Status::Backend) if MLX cannot create a stream.
    pub fn new(mlx: &Mlx) -> Result<Self> {
        if mlx.on_gpu() {
            return Ok(Self(None));
        }
        let spare = SPARE.lock().pop();
        Ok(Self(Some(match spare {
            Some(stream) => stream,
            None => UnownedStream(unowned_stream(&Device::cpu())?),
        })))
    }

    /// Runs `work` on the stream, or on the stream of the enclosing call.
    pub fn run<T>(&self, mlx: &Mlx, work: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(stream) => mlx.run_on(&stream.0, work),
            None => mlx.run(work),
        }
    }
}

impl Drop for ProgramStream {
    fn drop(&mut self) {
        SPARE.lock().extend(self.0.take());
    }
}
