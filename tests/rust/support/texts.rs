//! Caches that read texts, whose keys and values are a function of the text.

use etkv_core::{CacheConfig, LayerPolicy, RecurrentLayer, Step};

use crate::backend::Backend;
use crate::campaign::saving::driver::{AnyCache, Shape};
use crate::{oracle, recurrence, Rng};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 32;

/// A kind of cache, in one of three formats. It keeps whole texts, or drops some of their rows. It drops rows because
/// of a window in its second layer or, in two of the formats, because of recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextShape {
    pub kind: usize,
    pub windowed: bool,
    /// 0 for 16 bits, 1 for 8 bits, 2 for 8 bits once the cache has [`CONVERTED_AT`] positions.
    pub format: usize,
}

/// The number of positions at which caches of the third format are converted.
pub const CONVERTED_AT: usize = 40;

/// Returns a config of caches that read texts.
pub fn config(capacity: i32) -> CacheConfig {
    CacheConfig {
        max_step_tokens: 8,
        ..CacheConfig::uniform(LAYERS, HEADS as i32, DIM as i32, capacity)
    }
}

impl TextShape {
    /// A contiguous cache in 16 bits that keeps whole texts.
    pub const PLAIN: Self = Self { kind: 0, windowed: false, format: 0 };

    pub fn of(seed: u64) -> Self {
        let seed = seed as usize;
        Self { kind: seed % 3, windowed: seed / 3 % 2 == 1, format: seed / 6 % 3 }
    }

    /// Returns whether the cache has recurrent layers instead of windows.
    fn is_recurrent(self) -> bool {
        self.windowed && self.format > 0
    }

    pub fn make<B: Backend>(self) -> AnyCache<B> {
        let mut config = CacheConfig { float_format: "f32".parse().unwrap(), ..config(200) };
        if self.format > 0 {
            [config.k_format, config.v_format] = ["affine8g32".parse().unwrap(); 2];
        }
        config.quantized_kv_start = (self.format == 2).then_some(CONVERTED_AT as i32);
        if self.windowed && !self.is_recurrent() {
            config.layers[1].policy = LayerPolicy::Window { window: 12, sinks: 2 };
        }
        if self.is_recurrent() {
            config.recurrent_layers = vec![
                RecurrentLayer::Convolution { channels: 3, width: 4 },
                RecurrentLayer::Recurrence {
                    k_heads: 1,
                    heads: 2,
                    k_dim: 2,
                    v_dim: 3,
                    channel_decay: false,
                },
            ];
            config.anchors = 1;
        }
        Shape { kind: self.kind, config }.make::<B>()
    }

    /// Returns a cache that has read a text.
    pub fn with_text<B: Backend>(self, text: &[i64]) -> AnyCache<B> {
        let mut cache = self.make::<B>();
        read::<B>(&mut cache, text);
        cache
    }

    /// Checks that a cache equals one that read the text itself.
    #[track_caller]
    pub fn check_read<B: Backend>(self, cache: &mut AnyCache<B>, text: &[i64]) {
        let mut fresh = self.with_text::<B>(text);
        assert_eq!(answer::<B>(cache, text), answer::<B>(&mut fresh, text), "{text:?}");
    }
}

/// Reads the tokens of a text after those in the cache.
pub fn read<B: Backend>(cache: &mut AnyCache<B>, text: &[i64]) {
    loop {
        let start = cache.next_position().unwrap() as usize;
        if start < 64 {
            // Texts that diverge after this position can continue from it.
            cache.mark_turn(70).unwrap();
        }
        // Steps end at the same tokens, whatever the number of tokens in the cache is at the start.
        let end = text.len().min((start / 8 + 1) * 8);
        if start == end {
            return;
        }
        step::<B>(cache, text, start, end);
    }
}

/// Returns the bits of the rows that the query of one more token sees.
pub fn answer<B: Backend>(cache: &mut AnyCache<B>, text: &[i64]) -> Vec<u32> {
    let mut longer = text.to_vec();
    longer.push(5);
    let at = text.len();
    assert_eq!(cache.next_position(), Ok(at as i32));
    step::<B>(cache, &longer, at, at + 1)
}

fn step<B: Backend>(cache: &mut AnyCache<B>, text: &[i64], start: usize, end: usize) -> Vec<u32> {
    let seed_of = |at: usize| {
        text[..=at].iter().fold(17u64, |hash, &token| {
            (hash ^ token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
        })
    };
    let positions: Vec<i32> = (start as i32..end as i32).collect();
    let mut bits = Vec::new();
    let recurrent = cache.config().recurrent_layers.clone();
    let mut step = Step::begin(&mut **cache, &positions).unwrap();
    for (id, layer) in recurrent.into_iter().enumerate() {
        let tokens: Vec<u64> = (start..end).map(seed_of).collect();
        let mut outputs = Vec::new();
        step.update_recurrent(id, &mut |spec| {
            recurrence::planned::<B>(id, layer, &tokens, spec, &mut outputs)
        })
        .unwrap();
        bits.extend(outputs.iter().flatten().flatten().map(|value| value.to_bits()));
    }
    for layer in 0..LAYERS {
        let [q, k, v] = [0, 1, 2].map(|which| {
            let row = |at| {
                let mut rng = Rng::new(seed_of(at) ^ (layer * 3 + which) as u64);
                oracle::random_rows(&mut rng, 1, HEADS, DIM).remove(0)
            };
            B::tensor(&(start..end).map(row).collect::<Vec<_>>())
        });
        let spec = step.update_and_fetch(layer, &k, &v).unwrap();
        let out = B::attend(&q, &spec, 0.3).unwrap();
        drop(spec);
        bits.extend(B::rows(&out).iter().flatten().flatten().map(|value| value.to_bits()));
    }
    step.commit(&[]).unwrap();
    bits
}

/// Returns a text of a family in which many texts share their first tokens.
pub fn some_text(rng: &mut Rng) -> Vec<i64> {
    let mut text = Vec::new();
    let n = 1 + rng.below(90);
    while text.len() < n {
        // Appends one of two lists of 13 tokens.
        let which = i64::from(rng.chance(0.35));
        text.extend((0..13).map(|i| which * 100 + i));
    }
    text.truncate(n);
    text
}

/// Returns the number of first tokens that two texts share.
pub fn shared(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
