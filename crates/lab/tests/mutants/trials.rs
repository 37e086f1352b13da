//! The problems that a faulty kernel must fail: in them every bound is met exactly, and every part of a kernel has
//! something to do.

use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore::{DType, Device, Mask, Name, Pass, Problem};
use flashcore_lab::guarded::Arrangement;
use flashcore_lab::inputs::Distribution;
use flashcore_lab::operands::Operands;
use flashcore_lab::rule::Yardstick;

/// A problem with its inputs and the truth about them.
pub struct Trial {
    pub operands: Operands,
    truth: Yardstick,
}

impl Trial {
    fn new(problem: Problem, lengths: Option<Vec<u32>>) -> Trial {
        let operands = Operands::draw(problem, lengths, Arrangement::Bhsd, Distribution::Normal, 7);
        Trial { truth: operands.yardstick(), operands }
    }

    /// Runs it under every timing of asynchronous effects and warps. Returns what is wrong with the first run that is
    /// not right, or that the simulator objects to.
    pub fn run(&self, gpu: &SimGpu) -> Result<(), String> {
        configs().into_iter().try_for_each(|config| self.run_with(gpu, config))
    }

    fn run_with(&self, gpu: &SimGpu, config: Config) -> Result<(), String> {
        let device = Device::sim(gpu.clone().with_config(config));
        let Operands { q, k, v, .. } = &self.operands;
        let given = if self.operands.problem.pass == Pass::Backward {
            let run = self.operands.attention().backward(&device, &self.operands.given());
            let out = run.map_err(|error| error.to_string())?;
            vec![(Name::Dq, out.dq.to_f32()), (Name::Dk, out.dk.to_f32()), (Name::Dv, out.dv.to_f32())]
        } else {
            let run = self.operands.attention().with_lse().run(&device, &q.view(), &k.view(), &v.view());
            let out = run.map_err(|error| error.to_string())?;
            let lse = out.lse.map(|lse| (Name::Lse, lse.to_f32()));
            [(Name::O, out.o.to_f32())].into_iter().chain(lse).collect()
        };
        let passed = self.truth.judge(&given).passed();
        if passed { Ok(()) } else { Err("the numbers are wrong".into()) }
    }
}

fn problem(batch: usize, heads: usize, len: usize, head_dim: usize) -> Problem {
    Problem::new(batch, heads, len, head_dim, DType::F16).with_lse()
}

/// Tails, empty rows, windows, groups, key lengths.
pub fn ampere() -> Vec<Trial> {
    let window = Mask::Window { left: Some(150), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 101, 64).with_kv(1, 300).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 500, 64).with_head_dim_v(72).with_mask(window), None),
        Trial::new(problem(3, 1, 70, 64).with_kv(1, 130).with_key_lengths(), Some(vec![130, 37, 0])),
        Trial::new(problem(1, 1, 130, 8).with_kv(1, 65).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 128, 96).with_kv(1, 384), None),
    ]
}

/// The same for gradients: of queries that no key sees and keys that no query sees, too.
pub fn backward() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 101, 64).with_kv(1, 70).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 150, 64).with_head_dim_v(72).with_mask(window).backward(), None),
        Trial::new(
            problem(3, 1, 70, 64).with_kv(1, 130).with_key_lengths().backward(),
            Some(vec![130, 37, 0]),
        ),
        Trial::new(problem(1, 2, 96, 8).with_kv(2, 192).backward(), None),
    ]
}

/// The same for tiles of 64 queries and more: more tiles than persistent blocks, so that every slot is used again, and
/// so many keys that each of four blocks that share them uses its slots again; rows and keys that leave a warpgroup or
/// a block without work; windows wider and narrower than a key tile.
pub fn hopper() -> Vec<Trial> {
    let wide = Mask::Window { left: Some(100), right: Some(10) };
    let narrow = Mask::Window { left: Some(19), right: Some(10) };
    let long = Mask::Window { left: Some(170), right: Some(10) };
    let lengths = vec![130, 10, 0, 0, 45, 64];
    vec![
        Trial::new(problem(1, 7, 100, 64).with_kv(1, 130).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 300, 80).with_head_dim_v(96).with_mask(wide), None),
        Trial::new(problem(6, 1, 40, 64).with_kv(1, 130).with_key_lengths(), Some(lengths)),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 91).with_mask(narrow), None),
        Trial::new(problem(1, 5, 260, 64).with_kv(1, 395).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 395).with_mask(long), None),
        Trial::new(problem(2, 1, 40, 64).with_kv(1, 200).with_key_lengths(), Some(vec![90, 171])),
        // Sections of heads that end before a round does, and scores that are too large for the short way.
        Trial::new(problem(1, 2, 520, 32).with_kv(1, 460).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 200).with_scale(1000.0), None),
    ]
}

/// The same for gradients in blocks of 128 keys: several of them, with more steps than slots.
pub fn hopper_backward() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 330, 64).with_kv(1, 290).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 300, 40).with_head_dim_v(64).with_mask(window).backward(), None),
        Trial::new(
            problem(3, 1, 270, 64).with_kv(1, 140).with_key_lengths().backward(),
            Some(vec![140, 37, 0]),
        ),
        Trial::new(problem(1, 2, 130, 64).with_kv(2, 192).backward(), None),
        // Keys that only the last query sees, and such that only the first does.
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 129).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 277).with_mask(window).backward(), None),
    ]
}

/// The ways of running: asynchronous effects late and early, and warps interleaved.
fn configs() -> [Config; 3] {
    // A mutant may wait forever; no honest run here needs a tenth of this. The first finding is enough.
    let config = Config { budget: 4_000_000, threads: 1, max_findings: 1, ..Config::default() };
    [
        config.clone(),
        Config { async_mode: AsyncMode::Early, ..config.clone() },
        Config { async_mode: AsyncMode::Random(3), seed: 5, ..config },
    ]
}
