//! The programs that this build runs.

use std::pin::Pin;

use etkv_core::Result;
use etkv_cpu::program::Call;
use etkv_cpu::Parallel;
use etkv_delegate::{Argument, Host, LoadOptions};

use super::Constants;

/// A loaded program of one of the backends.
pub enum Program {
    /// A call of a CPU program.
    Cpu(Call),
    /// An MLX program.
    #[cfg(feature = "mlx-programs")]
    Mlx(etkv_mlx_program::Program),
}

impl Program {
    /// Loads a payload as a CPU program, or else as an MLX program.
    ///
    /// # Errors
    /// Those of the program; [`Unsupported`](etkv_core::Status::Unsupported) for an MLX program in a build
    /// without MLX.
    pub fn load(
        on_cpu: bool,
        payload: &[u8],
        constants: Pin<&mut Constants>,
        options: &LoadOptions,
    ) -> Result<Self> {
        if on_cpu {
            return Ok(Self::Cpu(Call::load(payload, options)?));
        }
        Self::load_mlx(payload, constants, options)
    }

    #[cfg(feature = "mlx-programs")]
    fn load_mlx(
        payload: &[u8],
        constants: Pin<&mut Constants>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let mut constants = mlx::ProgramConstants(constants);
        let steps = etkv_mlx_cuda::step_compiler();
        let program = etkv_mlx_program::Program::load(payload, &mut constants, options, steps)?;
        Ok(Self::Mlx(program))
    }

    #[cfg(not(feature = "mlx-programs"))]
    fn load_mlx(_: &[u8], _: Pin<&mut Constants>, _: &LoadOptions) -> Result<Self> {
        etkv_core::fail!(
            Unsupported,
            "this libetkv was built without MLX, which the program needs"
        );
    }

    /// Runs the program on its inputs, and writes the outputs to the memory that `host` returns.
    ///
    /// # Errors
    /// Those of the program.
    pub fn execute(
        &mut self,
        inputs: &[Argument],
        output_types: &[i8],
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        match self {
            Self::Cpu(call) => call.execute(inputs, output_types, host, parallel),
            #[cfg(feature = "mlx-programs")]
            Self::Mlx(program) => Ok(program.execute(inputs, output_types, host)?),
        }
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        match self {
            Self::Cpu(call) => call.n_inputs(),
            #[cfg(feature = "mlx-programs")]
            Self::Mlx(program) => program.n_inputs(),
        }
    }

    /// Returns the number of outputs.
    pub fn n_outputs(&self) -> usize {
        match self {
            Self::Cpu(call) => call.n_outputs(),
            #[cfg(feature = "mlx-programs")]
            Self::Mlx(program) => program.n_outputs(),
        }
    }
}

#[cfg(feature = "mlx-programs")]
mod mlx {
    use std::pin::Pin;

    use etkv_mlx_program::ConstantSource;

    use crate::bridge::Constants;

    /// The constants of a program's file.
    pub struct ProgramConstants<'a>(pub Pin<&'a mut Constants>);

    impl ConstantSource for ProgramConstants<'_> {
        fn find(&mut self, name: &str) -> Option<&[u8]> {
            self.0.as_mut().bytes(name)
        }
    }
}
