//! The campaign of the caches on MLX arrays.

etkv_tests::campaign!(etkv_tests::on_mlx::OnMlx);
