//! FlashCore attention for candle, under the names, layouts and semantics of `candle-flash-attn`.
//!
//! To replace that crate, change its line in `Cargo.toml`, and nothing else:
//!
//! ```toml
//! candle-flash-attn = { package = "flashcore-candle", version = "0.1", features = ["cuda"] }
//! ```
//!
//! Tensors are (batch, length, heads, head_dim); k and v may have fewer heads than q. A causal mask and windows are
//! aligned to the last query and key. Unlike `candle-flash-attn`, everything here also runs on the CPU, in f16, bf16
//! and f32, and tensors are used with whatever strides they have, as long as the last dimension is contiguous.
//!
//! ```
//! use candle_core::{Device, Tensor};
//!
//! let q = Tensor::randn(0_f32, 1.0, (2, 16, 8, 64), &Device::Cpu)?; // (batch, length, heads, head_dim)
//! let kv = Tensor::randn(0_f32, 1.0, (2, 20, 2, 64), &Device::Cpu)?;
//! let o = flashcore_candle::flash_attn(&q, &kv, &kv, 0.125, true)?;
//! assert_eq!(o.dims(), [2, 16, 8, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Attention has gradients, on the CPU and on a GPU, so that models can be trained with it:
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//!
//! let q = Var::randn(0_f32, 1.0, (1, 16, 2, 64), &Device::Cpu)?;
//! let o = flashcore_candle::flash_attn(&q, &q, &q, 0.125, true)?;
//! let gradients = o.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Tensors of 8-bit floats (`F8E4M3`), and caches of them, go through [`FlashAttnFp8`], with their descales.
//!
//! ALiBi and prefix ranges are not implemented, and refused with that reason. The variable-length functions are one call, of
//! packed keys or of keys in pages. On a GPU the host does not read the cumulative lengths and the table, and so does not
//! check them: as with `candle-flash-attn`, they have to rise, to end within the tensors, and to name pages that there are.

mod dense;
mod eight;
#[cfg(feature = "cuda")]
mod gpu;
mod gradients;
mod options;
mod varlen;

use candle_core::{Result, Tensor, bail};
pub use dense::FlashAttn;
pub use eight::FlashAttnFp8;
use options::Options;
use varlen::FlashAttnVarLen;

/// Attention of (batch, length, heads, head_dim) tensors.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// The same where each query sees `window_size_left` keys before and `window_size_right` after its own position; `None`
/// is no limit. No limit on the left and 0 on the right is causal.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op =
        FlashAttn { softmax_scale, alibi_slopes: None, window_size_left, window_size_right, softcap: None };
    gradients::apply(op, q, k, v)
}

/// With ALiBi slopes, which FlashCore does not have: an error.
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, causal.then_some(0))
}

/// With ALiBi slopes, which FlashCore does not have: an error.
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let slopes = Some(alibi_slopes);
    flash_attn_alibi_windowed_softcap(
        q,
        k,
        v,
        slopes,
        softmax_scale,
        window_size_left,
        window_size_right,
        0.0,
    )
}

/// Windows, and scores that become `softcap · tanh(score / softcap)`; 0 turns that off. ALiBi slopes are refused.
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: alibi_slopes.cloned(),
        window_size_left,
        window_size_right,
        softcap: Some(softcap),
    };
    gradients::apply(op, q, k, v)
}

/// Attention of packed sequences, one after the other: q is (all queries, heads, head_dim), k and v (all keys, heads,
/// head_dim). `seqlens_q` and `seqlens_k` are cumulative, u32, from 0 to the end of the last sequence; no sequence is
/// longer than `max_seqlen_q` and `max_seqlen_k`. Rows of q that are in no sequence give zeros.
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        None,
        causal.then_some(0),
    )
}

/// The same with a window, as [`flash_attn_windowed`] has it.
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    flash_attn_varlen_alibi_windowed_softcap(
        q,
        k,
        v,
        None,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
        0.0,
    )
}

/// From a paged cache: k and v are (pages, page_block_size, heads, head_dim), and row i of `block_table`, u32, says which
/// pages sequence i has. `seqlens_k` says how many keys there are. Prefix ranges are refused.
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if mm_prefix_ranges.is_some() {
        bail!("FlashCore has no prefix ranges; leave mm_prefix_ranges out")
    }
    match k.dims() {
        [_, page, _, _] if *page == page_block_size => {}
        dims => {
            bail!("k has the shape {dims:?}; with pages it is (pages, {page_block_size}, heads, head_dim)")
        }
    }
    let options = Options {
        scale: softmax_scale,
        alibi: false,
        left: window_size_left,
        right: window_size_right,
        softcap: softcap.unwrap_or(0.0),
    };
    let op = FlashAttnVarLen::new(options, q.device(), [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    q.apply_op3(k, v, op.with_pages(block_table)?)
}

/// With ALiBi slopes, which FlashCore does not have: an error.
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_varlen_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        None,
        causal.then_some(0),
    )
}

/// With ALiBi slopes, which FlashCore does not have: an error.
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    flash_attn_varlen_alibi_windowed_softcap(
        q,
        k,
        v,
        Some(alibi_slopes),
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
        0.0,
    )
}

/// Packed sequences, with a window and a softcap; 0 turns the latter off. ALiBi slopes are refused.
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let options = Options {
        scale: softmax_scale,
        alibi: alibi_slopes.is_some(),
        left: window_size_left,
        right: window_size_right,
        softcap,
    };
    let op = FlashAttnVarLen::new(options, q.device(), [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    q.apply_op3(k, v, op)
}
