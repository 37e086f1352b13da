//! What a call asks for, and tensors as FlashCore takes them.

use candle_core::{DType, Error, Layout, Result, bail};
use flashcore::{Attention, Element, Mask};

/// What a call asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub scale: f32,
    pub alibi: bool,
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub softcap: f32,
}

impl Options {
    /// The same for FlashCore, or an error for what it does not have.
    pub fn attention(&self) -> Result<Attention<'static>> {
        if self.alibi {
            bail!("FlashCore has no ALiBi slopes; add the bias to the scores with candle's own operations")
        }
        let mask = match (self.left, self.right) {
            (None, None) => Mask::None,
            (None, Some(0)) => Mask::Causal,
            (left, right) => Mask::Window { left, right },
        };
        Ok(Attention::new().mask(mask).scale(self.scale).softcap(self.softcap))
    }
}

/// An error of FlashCore's as candle's.
pub(crate) fn fail(error: flashcore::Error) -> Error {
    Error::wrap(error)
}

/// Refuses dtypes that attention does not accept together, or not on this device.
pub(crate) fn bad_dtypes<T>([q, k, v]: [DType; 3]) -> Result<T> {
    bail!(
        "flash-attn takes q, k and v that are all f16, all bf16 or, on the CPU, all f32, not {q:?}, {k:?} and {v:?}"
    )
}

/// The layout of a (batch, length, heads, head_dim) tensor that begins at its offset.
pub(crate) fn dense(name: &str, layout: &Layout) -> Result<flashcore::Layout> {
    let ([b, s, h, d], [b_stride, s_stride, h_stride, d_stride]) = (layout.dims(), layout.stride()) else {
        bail!(
            "{name} has {} dimensions; attention takes (batch, length, heads, head_dim)",
            layout.dims().len()
        )
    };
    Ok(layout_of([*b, *h, *s, *d], [*b_stride, *h_stride, *s_stride, *d_stride]))
}

/// candle gives dimensions of size 1 any stride, which may be misaligned for a GPU: here it becomes 0.
fn layout_of(shape: [usize; 4], mut strides: [usize; 4]) -> flashcore::Layout {
    for (size, stride) in shape.iter().zip(&mut strides).take(3) {
        if *size == 1 {
            *stride = 0;
        }
    }
    flashcore::Layout { shape, strides }
}

/// The layout of rows `start..end` of an (all rows, heads, head_dim) tensor, and where they begin.
pub(crate) fn part(
    name: &str,
    layout: &Layout,
    [start, end]: [usize; 2],
) -> Result<(flashcore::Layout, usize)> {
    let ([_, h, d], [s_stride, h_stride, d_stride]) = (layout.dims(), layout.stride()) else {
        bail!("{name} has {} dimensions; attention takes (all rows, heads, head_dim)", layout.dims().len())
    };
    let part = layout_of([1, *h, end - start, *d], [0, *h_stride, *s_stride, *d_stride]);
    Ok((part, layout.start_offset() + start * s_stride))
}

/// A view of candle's memory.
pub(crate) fn view<T: Element>(
    data: &[T],
    offset: usize,
    layout: flashcore::Layout,
) -> Result<flashcore::Tensor<'_>> {
    let data = data.get(offset..).unwrap_or_default();
    flashcore::Tensor::strided(data, layout).map_err(fail)
}
