//! Gradients in f64, as they are defined: for scales and softcaps that leave f32 no room, and for scores in the thousands.
//! This is slow and rare.
//!
//! lse is not read: f32 does not hold scores of such a size well enough to subtract them.
#![allow(unsafe_code)] // Raw tensors; the contract and the plan bound every index.

use super::super::{
    job::{Job, rows_of},
    plan::Task,
    rows,
    simd::Simd,
    visible::Visible,
    wide::dot,
};
use crate::{Name, Problem, layouts::View};

/// All gradients of a kv head.
///
/// # Safety
/// Requires a CPU with `S`; the call must have passed the contract and the task hold all rows and keys of a head.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(job: &Job<'_>, task: &Task) {
    let call = job.call;
    let Problem { head_dim, head_dim_v, scale, softcap, .. } = call.problem;
    let (scale, softcap) = (f64::from(scale), softcap.map(f64::from));
    let visible = Visible::new(call, task.batch);
    let read = |view: View<'_>, h: usize, s: usize, count: usize| {
        let mut wide = vec![0.0_f32; count * view.layout.shape[3]];
        // SAFETY: the caller's promise; there is room for all of the rows.
        unsafe { rows_of(view, task.batch, h, s, count).widen::<S>(wide.as_mut_ptr()) };
        wide
    };
    let write = |to: View<'_>, h: usize, s: usize, row: &[f64]| {
        let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
        // SAFETY: the caller's promise.
        unsafe { rows::narrow::<S>(to.dtype, row.as_ptr(), to.row_at(task.batch, h, s), row.len()) };
    };
    let k = read(call.k(), task.head, 0, visible.count());
    let v = read(call.v(), task.head, 0, visible.count());
    let (mut dk, mut dv) = (vec![0.0; task.keys.len() * head_dim], vec![0.0; task.keys.len() * head_dim_v]);
    for row in task.rows.clone() {
        let (h, s) = job.head_and_query(task.head, row);
        let keys = visible.keys(s);
        let mut dq = vec![0.0; head_dim];
        if !keys.is_empty() {
            let wide = |name: Name| -> Vec<f64> {
                let tensor = call.some_of_queries(name);
                tensor.map_or_else(Vec::new, |view| read(view, h, s, 1).into_iter().map(f64::from).collect())
            };
            let (query, d_o, dlse) = (wide(Name::Q), wide(Name::Do), wide(Name::Dlse));
            let dlse = dlse.first().copied().unwrap_or(0.0);
            let score = |key: &[f32]| {
                let score = dot(&query, key) * scale;
                // The score, and its slope.
                softcap.map_or((score, scale), |cap| {
                    let t = (score / cap).tanh();
                    (cap * t, scale * (1.0 - t * t))
                })
            };
            let k_rows = || k[keys.start * head_dim..keys.end * head_dim].chunks_exact(head_dim);
            let v_rows = || v[keys.start * head_dim_v..keys.end * head_dim_v].chunks_exact(head_dim_v);
            let scores: Vec<(f64, f64)> = k_rows().map(score).collect();
            let max = scores.iter().map(|&(score, _)| score).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|&(score, _)| (score - max).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|&(score, _)| (score - max).exp() / sum).collect();
            let dp: Vec<f64> = v_rows().map(|value| dot(&d_o, value)).collect();
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for (i, key) in keys.clone().enumerate() {
                let ds = p[i] * (dp[i] - mean + dlse) * scores[i].1;
                let add = |to: &mut [f64], factor: f64, row: &mut dyn Iterator<Item = f64>| {
                    to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
                };
                add(&mut dv[key * head_dim_v..][..head_dim_v], p[i], &mut d_o.iter().copied());
                add(&mut dk[key * head_dim..][..head_dim], ds, &mut query.iter().copied());
                add(&mut dq, ds, &mut k[key * head_dim..][..head_dim].iter().map(|&x| f64::from(x)));
            }
        }
        write(call.of_queries(Name::Dq), h, s, &dq);
    }
    for key in task.keys.clone() {
        write(call.of_keys(Name::Dk), task.head, key, &dk[key * head_dim..][..head_dim]);
        write(call.of_keys(Name::Dv), task.head, key, &dv[key * head_dim_v..][..head_dim_v]);
    }
}
