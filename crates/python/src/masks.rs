//! Recognises masks: callers often give a tensor for what the kernels compute from a few numbers.
//!
//! A mask is accepted if it hides the same keys from all heads, if the keys that a batch entry sees are one range,
//! and if each query sees the part of it that no mask, a causal one or a window would leave. Everything else is
//! refused with the reason.
#![allow(unsafe_code)] // Reads elements through strides.

use std::{cell::Cell, cmp::Ordering, ops::Range};

use flashcore::{
    Mask, Name,
    half::{bf16, f16},
};
use pyo3::prelude::*;

use crate::{arrays::Array, dlpack, errors, options};

/// A mask as numbers.
#[derive(Debug, PartialEq)]
struct Pattern {
    /// The keys of each batch entry (one for all if the mask is the same for all) that any query sees.
    keys: Vec<Range<usize>>,
    mask: Mask,
    /// The finite number nearest to zero that hides a key; −∞ if none does.
    weakest: f64,
}

/// A score that is this much below another has no weight next to it: its exponential is 0 in f32.
const WEIGHTLESS: f64 = 104.0;

/// What one element says about a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    Seen,
    Hidden,
    /// Hidden by a finite number rather than −∞. The effect is the same where that number is far below any
    /// difference of scores, except for a query that sees no key.
    HiddenFinitely,
}

/// The elements of a mask, (batch, heads, queries, keys); each of the first three may be 1 for all.
struct View<'a> {
    array: &'a Array<'a>,
    sizes: [usize; 4],
    strides: [isize; 4],
    /// The finite number nearest to zero that was met and hides a key.
    weakest: Cell<f64>,
}

impl<'a> View<'a> {
    fn new(array: &'a Array<'a>) -> Result<Self, String> {
        let rank = array.rank();
        if !(2..=4).contains(&rank) {
            return Err(format!("it has {rank} dimensions, possible are 2 to 4"));
        }
        let (mut sizes, mut strides) = ([1; 4], [0; 4]);
        for dim in 0..rank {
            sizes[4 - rank + dim] = array.sizes()[dim].max(0) as usize;
            strides[4 - rank + dim] = array.strides()[dim] as isize;
        }
        for dim in 0..3 {
            // An expanded dimension has the same values everywhere.
            if strides[dim] == 0 && sizes[dim] > 1 {
                sizes[dim] = 1;
            }
        }
        Ok(Self { array, sizes, strides, weakest: Cell::new(f64::NEG_INFINITY) })
    }

    fn sight(&self, at: [usize; 4]) -> Result<Sight, String> {
        let offset: isize = at.iter().zip(&self.strides).map(|(&i, &stride)| i as isize * stride).sum();
        let data = self.array.data();
        let float = |value: f64| match value {
            0.0 => Ok(Sight::Seen),
            f64::NEG_INFINITY => Ok(Sight::Hidden),
            _ if value <= -WEIGHTLESS => {
                self.weakest.set(self.weakest.get().max(value));
                Ok(Sight::HiddenFinitely)
            }
            _ => Err(format!(
                "it adds {value} to a score, possible are 0 and -inf, or a number as low: a bias is not fused"
            )),
        };
        // SAFETY: the index is inside the sizes that the array's owner gave for its memory.
        unsafe {
            match (self.array.dtype.code, self.array.dtype.bits) {
                (dlpack::BOOL, 8) => {
                    Ok(if data.offset(offset).read() != 0 { Sight::Seen } else { Sight::Hidden })
                }
                (dlpack::FLOAT, 64) => float(data.cast::<f64>().offset(offset).read()),
                (dlpack::FLOAT, 32) => float(data.cast::<f32>().offset(offset).read().into()),
                (dlpack::FLOAT, 16) => float(data.cast::<f16>().offset(offset).read().into()),
                (dlpack::BFLOAT, 16) => float(data.cast::<bf16>().offset(offset).read().into()),
                _ => Err("it is neither bool nor of the type of q".into()),
            }
        }
    }

    /// The keys that a query sees, which must be one range.
    fn row(&self, b: usize, h: usize, q: usize) -> Result<Range<usize>, String> {
        let mut seen: Option<Range<usize>> = None;
        let mut finite = false;
        for key in 0..self.sizes[3] {
            match self.sight([b, h, q, key])? {
                Sight::Seen => match &mut seen {
                    None => seen = Some(key..key + 1),
                    Some(range) if range.end == key => range.end = key + 1,
                    Some(_) => return Err(format!("query {q} sees keys that do not lie side by side")),
                },
                Sight::Hidden => {}
                Sight::HiddenFinitely => finite = true,
            }
        }
        if seen.is_none() && finite {
            return Err(format!(
                "query {q} sees no key, and a finite number hides none where there is no other; use -inf or bool"
            ));
        }
        Ok(seen.unwrap_or(0..0))
    }
}

fn recognise(view: &View<'_>, len_q: usize) -> Result<Pattern, String> {
    let [batch, heads, rows, _] = view.sizes;
    if rows != len_q && rows != 1 {
        return Err(format!("it has {rows} queries, but q has {len_q}"));
    }
    // What each query of each entry sees, and what all queries of an entry see together.
    let (mut all, mut keys) = (Vec::with_capacity(batch * rows), Vec::with_capacity(batch));
    for b in 0..batch {
        let mut of_entry: Option<Range<usize>> = None;
        for q in 0..rows {
            // Without heads there is nothing to read, and nobody who looks.
            let mut of_heads = None;
            for h in 0..heads {
                let range = view.row(b, h, q)?;
                if *of_heads.get_or_insert_with(|| range.clone()) != range {
                    return Err("it differs from head to head".into());
                }
            }
            let range = of_heads.unwrap_or(0..0);
            if !range.is_empty() {
                of_entry = Some(match of_entry {
                    None => range.clone(),
                    Some(keys) => keys.start.min(range.start)..keys.end.max(range.end),
                });
            }
            all.push(range);
        }
        keys.push(of_entry.unwrap_or(0..0));
    }
    let row_of = |b: usize, q: usize| &all[b * rows + if rows == 1 { 0 } else { q }];
    let follows = |mask: Mask| {
        (0..batch).all(|b| {
            let entry = &keys[b];
            (0..len_q).all(|q| {
                let expected = mask.keys(q, len_q, entry.len());
                let given = row_of(b, q);
                match (expected.is_empty(), given.is_empty()) {
                    (false, false) => {
                        expected.start + entry.start == given.start && expected.end + entry.start == given.end
                    }
                    (expected, given) => expected == given,
                }
            })
        })
    };
    let candidates = [Mask::None, Mask::CausalTopLeft, Mask::Causal];
    let window = || {
        // The window that the cut rows ask for; the right one explains every row.
        let (mut left, mut right) = (None, None);
        for (b, entry) in keys.iter().enumerate() {
            for q in 0..len_q {
                let (range, place) = (row_of(b, q), (entry.end + q) as i64 - len_q as i64);
                if range.is_empty() {
                    continue;
                }
                // A side shows where it cuts a row, and where the rows that see nothing end or begin.
                let empty = |q: usize| q < len_q && row_of(b, q).is_empty();
                if range.start > entry.start || empty(q + 1) {
                    left = Some(usize::try_from(place - range.start as i64).ok()?);
                }
                if range.end < entry.end || empty(q.wrapping_sub(1)) {
                    right = Some(usize::try_from(range.end as i64 - 1 - place).ok()?);
                }
            }
        }
        Some(Mask::Window { left, right })
    };
    let found = candidates.into_iter().find(|&mask| follows(mask));
    match found.or_else(|| window().filter(|&mask| follows(mask))) {
        Some(mask) => Ok(Pattern { keys, mask, weakest: view.weakest.get() }),
        None => Err("what it hides is neither padding nor causal nor a window".into()),
    }
}

/// The lowest finite number of a mask's type, which hides whatever the scores are.
fn lowest(array: &Array<'_>) -> f64 {
    match (array.dtype.code, array.dtype.bits) {
        (dlpack::FLOAT, 16) => f16::MIN.into(),
        (dlpack::BFLOAT, 16) => bf16::MIN.into(),
        (dlpack::FLOAT, 32) => f32::MIN.into(),
        _ => f64::MIN,
    }
}

/// The numbers behind a mask: the first key and the end of the keys of each batch entry, the mask's name and the
/// window's sides.
///
/// `reach` says how low a number must be to hide any key of this call. It is called only where a finite number is to
/// hide one; without it only the lowest number of the mask's type does.
#[pyfunction]
#[pyo3(signature = (mask, len_q, reach=None))]
#[allow(clippy::type_complexity)] // One tuple, taken apart where it is received.
pub fn recognise_mask(
    mask: &Bound<'_, PyAny>,
    len_q: usize,
    reach: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Vec<usize>, Vec<usize>, &'static str, Option<usize>, Option<usize>)> {
    let py = mask.py();
    let array = Array::read(mask, Name::Tensor)?;
    if !array.on_host() {
        return Err(errors::contract(py, "the mask to recognise must lie on the host"));
    }
    let refuse = |reason: String| {
        let text = format!(
            "attn_mask is not one that FlashCore fuses: {reason}. Use is_causal, a window or key lengths, or torch's own attention for this mask"
        );
        errors::unsupported(py, &text)
    };
    let pattern = View::new(&array).and_then(|view| recognise(&view, len_q)).map_err(refuse)?;
    if pattern.weakest.is_finite() {
        let needed = match reach {
            Some(reach) => -reach.call0()?.extract::<f64>()?,
            None => lowest(&array),
        };
        // NaN is not below anything.
        if !matches!(pattern.weakest.partial_cmp(&needed), Some(Ordering::Less | Ordering::Equal)) {
            return Err(refuse(format!(
                "it adds {} to a score, but only {needed} and lower is sure to hide any key of these; use -inf or bool",
                pattern.weakest
            )));
        }
    }
    let (name, left, right) = options::of_mask(pattern.mask);
    let (starts, ends) = pattern.keys.into_iter().map(|keys| (keys.start, keys.end)).unzip();
    Ok((starts, ends, name, left, right))
}
