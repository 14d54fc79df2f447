//! The CPU's kernels of recurrent layers over real caches: they give the same bits as a text that runs in one step.
//! This holds whatever was cut, forked, aborted, proposed, saved, loaded or attached earlier.

use etkv_core::{
    AttendCache, CacheConfig, CellsCache, RecurrentLayer, RecurrentRows, RecurrentSpec, Result,
};
use etkv_cpu::attention::synthetic::Threads;
use etkv_cpu::recurrent::{
    convolve, scan, Activation, ConvolveInputs, Scan, ScanInputs, Workspace,
};
use etkv_cpu::{CpuStore, Tensor, View};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::recurrent::texts_run_as_if_alone;
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::oracle::{Row, Rows};
use etkv_tests::recurrence::{inputs_of, Inputs, Kernels, Token};

struct CpuKernels;

impl Kernels<OnCpu> for CpuKernels {
    fn planned(
        layer: usize,
        config: RecurrentLayer,
        tokens: &[Token],
        spec: &RecurrentSpec<View>,
        outputs: &mut Rows,
    ) -> Result<RecurrentRows<Tensor>> {
        let inputs: Vec<Inputs> =
            tokens.iter().map(|&token| inputs_of(layer, config, token)).collect();
        let of = |part: &dyn Fn(&Inputs) -> Row| -> Tensor {
            OnCpu::tensor(&inputs.iter().map(part).collect::<Rows>())
        };
        let mut workspace = Workspace::default();
        let (out, rows) = match config {
            RecurrentLayer::Convolution { channels, width } => {
                let column = |token: &Inputs| token.k[0].iter().map(|&x| vec![x]).collect();
                let weight: Vec<f32> = (0..channels * width).map(|n| (n as f32).sin()).collect();
                let inputs = ConvolveInputs {
                    x: &of(&column),
                    weight: &Tensor::new([1, 1, channels, width], weight)?,
                    bias: None,
                    activation: if layer == 0 { Activation::Silu } else { Activation::None },
                };
                convolve(&inputs, spec, None, &mut workspace, &Threads(2))?
            }
            RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                let [k_heads, heads, k_dim, v_dim] =
                    [k_heads, heads, k_dim, v_dim].map(|size| size as usize);
                let scale = 0.7;
                let sizes = Scan { k_heads, heads, k_dim, v_dim, channel_decay, scale };
                let beta = of(&|token| token.beta.iter().map(|&beta| vec![beta]).collect());
                let inputs = ScanInputs {
                    q: &of(&|token| token.q.clone()),
                    k: &of(&|token| token.k.clone()),
                    v: &of(&|token| token.v.clone()),
                    g: &of(&|token| token.g.clone()),
                    // Layers with and without the delta rule.
                    beta: (layer != 1).then_some(&beta),
                };
                scan(&sizes, &inputs, spec, None, &mut workspace, &Threads(2))?
            }
        };
        outputs.extend(OnCpu::rows(&out));
        Ok(rows)
    }

    fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows {
        let n = text.len() as i32;
        let cache = CacheConfig {
            layers: Vec::new(),
            recurrent_layers: vec![config],
            ..CacheConfig::uniform(0, 1, 1, n)
        };
        let mut cache = CellsCache::<CpuStore>::contiguous(cache).unwrap();
        cache.begin(&(0..n).collect::<Vec<_>>()).unwrap();
        let mut outputs = Rows::new();
        cache
            .update_recurrent(0, &mut |spec| Self::planned(layer, config, text, spec, &mut outputs))
            .unwrap();
        cache.commit().unwrap();
        outputs
    }
}

#[test]
fn kernels_give_the_bits_of_a_text_that_ran_in_one_step() {
    texts_run_as_if_alone::<OnCpu, CpuKernels>(200);
}
