//! Tests of caches that need neither MLX nor a process of their own. They are one program, because each program
//! compiles the caches' generic code again.

mod bookkeeping;
mod on_cpu;
mod on_vec;
mod prefix_cache;
mod recurrent_cpu;
mod registry;
mod watch;
