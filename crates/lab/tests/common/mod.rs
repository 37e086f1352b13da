//! Honest engines of several makes: attention as others would write it, with roundings of their own.

use flashcore::{Attention, Problem, Tensor, TensorMut};
use flashcore_lab::engine::Engine;
pub use flashcore_lab::honest::Numerics;

/// Writes values in the order (batch, heads, length, head_dim).
pub fn write(values: &[f32], tensor: &mut TensorMut<'_>) {
    let [_, nh, ns, nd] = tensor.shape();
    for (i, row) in values.chunks_exact(nd.max(1)).enumerate() {
        tensor.write_row(i / (nh * ns), i / ns % nh, i % ns, row);
    }
}

/// An engine that computes attention rightly, in one of the usual ways.
pub struct Honest {
    pub numerics: Numerics,
}

impl Engine for Honest {
    fn name(&self) -> &str {
        match self.numerics {
            Numerics::PlainReversed => "plain-reversed",
            Numerics::TiledBase2 => "tiled-base2",
            Numerics::TiledLanes => "tiled-lanes",
            Numerics::Split => "split",
        }
    }

    fn supports(&self, problem: &Problem) -> Result<(), String> {
        if problem.key_lengths { Err("key lengths are not its business".into()) } else { Ok(()) }
    }

    fn run(
        &self,
        attention: &Attention<'_>,
        [q, k, v]: [&Tensor<'_>; 3],
        o: &mut TensorMut<'_>,
        lse: Option<&mut TensorMut<'_>>,
    ) -> flashcore::Result<()> {
        let problem = attention.problem(q, k, v)?;
        let Problem { heads_q, len_q, len_k, head_dim, head_dim_v, .. } = problem;
        let (q, k, v) = (q.to_f32(), k.to_f32(), v.to_f32());
        let (mut all, mut sums) = (Vec::new(), Vec::new());
        for (i, query) in q.chunks_exact(head_dim).enumerate() {
            let (head, s) =
                (i / len_q / heads_q * problem.heads_kv + i / len_q % heads_q / problem.group(), i % len_q);
            let range = problem.mask.keys(s, len_q, len_k);
            if range.is_empty() {
                all.extend(vec![0.0; head_dim_v]);
                sums.push(f32::NEG_INFINITY);
                continue;
            }
            let first = head * len_k + range.start;
            let keys = &k[first * head_dim..][..range.len() * head_dim];
            let values = &v[first * head_dim_v..][..range.len() * head_dim_v];
            let (out, lse) = self.numerics.attend(&problem, query, keys, values);
            all.extend(out);
            sums.push(lse);
        }
        write(&all, o);
        if let Some(lse) = lse {
            write(&sums, lse);
        }
        Ok(())
    }
}
