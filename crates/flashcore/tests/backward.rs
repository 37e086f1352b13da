//! Gradients by GPU kernels: on the simulator, against the oracle.
#![cfg(feature = "sim")]

use flashcore::{
    Attention, Backward, DType, Device, Gradients, Mask, Name, Problem, TensorBuf, oracle,
    plan::{Hardware, Kernel, Launch, Plan, Schedule, Target},
    sim::{AsyncMode, Config, SimGpu},
};
use flashcore_ptx::{Module, Op};
use shared::noise;

#[allow(dead_code)] // Only some of it is for gradients.
mod shared;

/// The inputs of a backward pass, and what they come to on a GPU and in truth.
struct Given {
    problem: Problem,
    tensors: Vec<(Name, TensorBuf)>,
    lengths: Option<Vec<u32>>,
}

impl Given {
    fn new(text: &str, lengths: Option<&[u32]>) -> Self {
        let problem: Problem = text.parse().unwrap();
        let mut given = Self { problem, tensors: Vec::new(), lengths: lengths.map(<[u32]>::to_vec) };
        let backward = problem.backward().signature();
        let outside = |name: &Name| !matches!(name, Name::O | Name::Lse);
        for (seed, of) in backward.inputs().filter(|of| outside(&of.name)).enumerate() {
            let values = noise(of.shape.iter().product(), seed);
            given.tensors.push((of.name, TensorBuf::from_f32(&values, of.shape, of.dtype).unwrap()));
        }
        let [q, k, v] = [Name::Q, Name::K, Name::V].map(|name| given.tensor(name).view());
        let found = given.attention().with_lse().run(&Device::cpu(), &q, &k, &v).unwrap();
        given.tensors.extend([(Name::O, found.o), (Name::Lse, found.lse.unwrap())]);
        given
    }

    fn tensor(&self, name: Name) -> &TensorBuf {
        &self.tensors.iter().find(|(of, _)| *of == name).unwrap().1
    }

    fn attention(&self) -> Attention<'_> {
        let attention = Attention::new().mask(self.problem.mask).scale(self.problem.scale);
        let attention = attention.softcap(self.problem.softcap.unwrap_or(0.0));
        match &self.lengths {
            Some(lengths) => attention.key_lengths(lengths),
            None => attention,
        }
    }

    fn with<T>(&self, work: impl FnOnce(&Backward<'_>) -> T) -> T {
        let view = |name| self.tensor(name).view();
        let [q, k, v] = [Name::Q, Name::K, Name::V].map(view);
        let (o, lse, d_o) = (view(Name::O), view(Name::Lse), view(Name::Do));
        let given = Backward::new([&q, &k, &v], &o, &lse, &d_o);
        if self.problem.lse { work(&given.with_dlse(&view(Name::Dlse))) } else { work(&given) }
    }

    fn run(&self, gpu: SimGpu) -> Result<Gradients, String> {
        let device = Device::sim(gpu);
        self.with(|given| self.attention().backward(&device, given)).map_err(|error| error.to_string())
    }

    /// The largest error of each gradient, beside the largest element that it truly has.
    fn errors(&self, gpu: SimGpu) -> [f64; 3] {
        let found = self.run(gpu).unwrap_or_else(|error| panic!("{}: {error}", self.problem));
        let truth = self.with(|given| {
            oracle::gradients(
                &self.attention().backward_problem(given).unwrap(),
                given,
                self.lengths.as_deref(),
            )
        });
        [(found.dq, truth.dq), (found.dk, truth.dk), (found.dv, truth.dv)].map(|(found, truth)| {
            let most = truth.iter().fold(1e-3_f64, |most, x| most.max(x.abs()));
            let off = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() / most;
            found.to_f32().iter().zip(&truth).map(off).fold(0.0, f64::max)
        })
    }

    #[track_caller]
    fn check(&self, gpu: SimGpu, what: &str) {
        for (error, name) in self.errors(gpu).into_iter().zip(["dq", "dk", "dv"]) {
            assert!(error < 8e-3, "{} with {what}: {name} is off by {error:.1e}", self.problem);
        }
    }
}

fn schedule(of: &str, block: u32, walk: u32, warps: u32, stages: u32) -> Schedule {
    let text =
        format!("sm80_bwd:of={of},block={block},walk={walk},warps={warps},stages={stages},order=longest");
    text.parse().unwrap()
}

#[test]
fn every_schedule_comes_to_what_gradients_are() {
    let window = Given::new("2x4/2x150/170x64/40 bf16 window(60,20) softcap=2 lse", None);
    let lengths = Given::new("3x2x100/130x24/56 f16 causal key-lengths", Some(&[130, 0, 77]));
    for of in ["dkdv", "dk", "dv", "dq"] {
        for (block, walk, warps, stages) in [(64, 16, 4, 1), (64, 64, 4, 2), (128, 16, 4, 2), (128, 64, 8, 1)]
        {
            let schedule = schedule(of, block, walk, warps, stages);
            let mode = if stages == 1 { AsyncMode::Early } else { AsyncMode::Late };
            let config = Config { async_mode: mode, ..Config::default() };
            let gpu = SimGpu::new(Target::Sm80).with_schedule(schedule).with_config(config);
            for given in [&window, &lengths] {
                given.check(gpu.clone(), &schedule.to_string());
            }
        }
    }
}

#[test]
fn what_the_planner_chooses_is_right_for_every_target_and_the_largest_head_dims() {
    for text in [
        "1x2x70x256 bf16 causal",
        "1x2/1x90/40x192/128 f16 softcap=30",
        "1x1x40/200x8 f16 causal-top-left scale=1000",
        "1x8/2x1/100x64 bf16 lse",
        "1x2/1x130/70x136/256 bf16 window(60,20) lse",
    ] {
        let given = Given::new(text, None);
        for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
            given.check(SimGpu::new(target), &target.to_string());
        }
    }
}

#[test]
fn without_queries_or_keys_the_other_gradients_are_zeros() {
    for (text, name, head_dim) in [
        ("1x2x0/50x64 f16", Name::Dk, 64),
        ("1x2x50/0x64 f16", Name::Dq, 64),
        ("1x2x0/50x256 f16", Name::Dk, 256),
        ("1x2x50/0x256 f16", Name::Dq, 256),
    ] {
        let given = Given::new(text, None);
        for target in [Target::Sm80, Target::Sm90a] {
            let found = given.run(SimGpu::new(target)).unwrap();
            let gradient = if name == Name::Dk { found.dk.to_f32() } else { found.dq.to_f32() };
            assert!(
                gradient.len() == 2 * 50 * head_dim && gradient.iter().all(|&x| x == 0.0),
                "{text}: {name}"
            );
        }
    }
}

/// What the simulator says of a small backward pass when instructions of the kernels are left out.
fn without(kernel: &'static str, dropped: fn(&Op) -> bool) -> Result<Gradients, String> {
    let edit = move |module: &mut Module| {
        let edited = &mut module.kernels[0];
        if edited.name == kernel {
            edited.body.retain(|inst| !dropped(&inst.op));
        }
    };
    let gpu = SimGpu::new(Target::Sm80).with_edit(edit);
    Given::new("1x2x200x64 f16", None).run(gpu)
}

#[test]
fn barriers_and_waits_that_are_left_out_are_found() {
    for kernel in ["flashcore_sm80_bwd_dkdv", "flashcore_sm80_bwd_dq"] {
        let said = without(kernel, |op| matches!(op, Op::BarSync { .. })).unwrap_err();
        assert!(said.contains("race"), "{said}");
        assert!(without(kernel, |op| matches!(op, Op::CpAsyncWait(_))).is_err());
        assert!(without(kernel, |op| matches!(op, Op::CpAsyncCommit)).is_err());
    }
    let said = without("flashcore_bwd_rows", |op| matches!(op, Op::St { .. })).unwrap_err();
    assert!(said.contains("workspace"), "{said}");
}

#[test]
fn on_hopper_one_kernel_computes_all_gradients_and_the_last_rounds_those_of_queries() {
    let hardware = Hardware::typical(Target::Sm90a);
    let problem = Problem::new(2, 8, 500, 64, DType::F16).with_kv(2, 300).with_mask(Mask::Causal).backward();
    let plan = Plan::choose(&problem, &hardware).unwrap();
    let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::BwdRows, Kernel::Sm90Bwd, Kernel::Sm90BwdFinish]);
    assert_eq!((plan.launches[1].grid, plan.launches[2].grid), ([12, 1, 1], [128, 1, 1]));
    // Two numbers per query, a gradient in f32, and two turns per 64 queries.
    assert_eq!(plan.workspace_bytes(), 2 * 8 * 512 * (2 * 4 + 64 * 4) + 2 * 8 * 8 * 2 * 4);
}

#[test]
fn wide_heads_have_blocks_of_queries_and_blocks_of_keys_in_one_launch_on_hopper() {
    let hardware = Hardware::typical(Target::Sm90a);
    let problem = Problem::new(2, 8, 500, 192, DType::BF16).with_kv(2, 300).with_head_dim_v(128).backward();
    let plan = Plan::choose(&problem, &hardware).unwrap();
    let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::BwdRows, Kernel::Sm90BwdWide]);
    // 128 queries of a query head, or 64 keys of a key head.
    assert_eq!(plan.launches[1].grid, [2 * 8 * 4 + 2 * 2 * 5, 1, 1]);
    // Two numbers per query.
    assert_eq!(plan.workspace_bytes(), 2 * 8 * 512 * 2 * 4);
    // More slots where heads are less wide.
    assert_eq!(plan.main().schedule.to_string(), "sm90_bwd_wide:stages=3,pingpong=1");
    let widest = Problem::new(2, 8, 500, 256, DType::BF16).backward();
    let plan = Plan::choose(&widest, &hardware).unwrap();
    assert_eq!(plan.main().schedule.to_string(), "sm90_bwd_wide:stages=2,pingpong=1");
}

#[test]
fn a_plan_is_three_launches_and_says_what_they_share() {
    let hardware = Hardware::typical(Target::Sm80);
    let problem = Problem::new(2, 8, 500, 64, DType::F16).with_kv(2, 300).with_mask(Mask::Causal).backward();
    let plan = Plan::choose(&problem, &hardware).unwrap();
    let kernels: Vec<Kernel> = plan.launches.iter().map(Launch::kernel).collect();
    assert_eq!(kernels, [Kernel::BwdRows, Kernel::Sm80Bwd, Kernel::Sm80Bwd]);
    assert!(plan.main().schedule.to_string().contains("of=dkdv"), "{plan}");
    // The gradients of keys have blocks of keys and kv heads, those of queries blocks of queries and heads.
    assert_eq!((plan.launches[1].grid, plan.launches[2].grid), ([2, 2, 5], [8, 2, 8]));
    // Two numbers per query and row of padding.
    assert_eq!(plan.workspace_bytes(), 2 * 2 * 8 * 512 * 4);
    // What a schedule does not compute is computed by others.
    for (text, launches) in [("dkdv", 3), ("dk", 4), ("dv", 4), ("dq", 3)] {
        let given = schedule(text, 64, 16, 4, 1);
        let plan = Plan::with_schedule(&problem, &hardware, given).unwrap();
        assert_eq!((plan.launches.len(), plan.main().schedule), (launches, given), "{plan}");
    }
    for kernel in [Kernel::BwdRows, Kernel::Sm80Fwd, Kernel::Scalar] {
        let said = Plan::with_kernel(&problem, &hardware, kernel).unwrap_err().to_string();
        assert!(said.contains("computes no gradients"), "{said}");
    }
}

#[test]
fn every_head_dim_has_a_backward_schedule_on_every_target() {
    for target in [Target::Sm80, Target::Sm89, Target::Sm90a] {
        for head_dim in (8..=256).step_by(8) {
            for head_dim_v in [8, head_dim, 256] {
                for len in [64, 8192] {
                    let problem = Problem::new(1, 16, len, head_dim, DType::BF16)
                        .with_head_dim_v(head_dim_v)
                        .with_softcap(20.0)
                        .backward();
                    let plan = Plan::choose(&problem, &Hardware::typical(target));
                    assert!(plan.is_ok(), "{problem} on {target}: {plan:?}");
                }
            }
        }
    }
}

#[test]
fn the_block_that_adds_last_rounds_gradients_of_queries_to_the_same_bits_as_a_last_launch() {
    for (text, block_m) in [
        ("1x2x300/500x64 bf16 causal", 128),
        ("2x4/2x130/140x64/40 f16 softcap=2 lse", 128),
        ("1x1x100x32 f16", 128),
        // Tiles that end beside what the keys after a block see, and queries that see all.
        ("1x1x300x64 bf16 window(inf,37)", 128),
        ("1x2x110/290x64 f16 window(inf,150)", 128),
        ("1x2x130/300x72 f16 causal-top-left", 64),
        ("1x2x520/260x40 bf16", 128),
        ("1x4/2x200/330x128 bf16 causal", 64),
        ("1x1x70/300x96/72 f16 lse", 64),
        ("1x2x260/390x72 f16 causal softcap=30", 64),
    ] {
        let given = Given::new(text, None);
        let hardware = Hardware::typical(Target::Sm90a);
        let run = |rounds: &str| {
            let schedule = format!("sm90_bwd:block_m={block_m},stages=2,pingpong=1{rounds}");
            let schedule: Schedule = schedule.parse().unwrap();
            let plan = Plan::with_schedule(&given.problem.backward(), &hardware, schedule).unwrap();
            let gpu = SimGpu::new(Target::Sm90a).with_schedule(schedule);
            (plan.launches.len(), given.run(gpu.clone()).unwrap_or_else(|error| panic!("{text}: {error}")))
        };
        let ((three, expected), (two, found)) = (run(""), run(",rounds=1"));
        assert_eq!((three, two), (3, 2), "{text}");
        for (found, expected) in
            [(&found.dq, &expected.dq), (&found.dk, &expected.dk), (&found.dv, &expected.dv)]
        {
            assert!(
                found.to_f32().iter().map(|x| x.to_bits()).eq(expected.to_f32().iter().map(|x| x.to_bits())),
                "{text}"
            );
        }
        let gpu = SimGpu::new(Target::Sm90a);
        let schedule = format!("sm90_bwd:block_m={block_m},stages=3,pingpong=0,rounds=1");
        given.check(gpu.with_schedule(schedule.parse().unwrap()), &schedule);
    }
}

#[test]
fn queries_that_see_no_key_need_the_last_launch() {
    let hardware = Hardware::typical(Target::Sm90a);
    let schedule: Schedule = "sm90_bwd:block_m=128,stages=2,pingpong=1,rounds=1".parse().unwrap();
    for (text, possible) in [
        ("1x2x300/500x64 f16 causal", true),
        ("1x2x500/300x64 f16", true),
        ("1x2x500/300x64 f16 causal", false),
        ("1x2x500/300x64 f16 causal-top-left", true),
        ("1x2x500/0x64 f16", false),
        ("1x2x500x64 f16 key-lengths", false),
        ("1x2x500x64 f16 window(60,20)", false),
        ("2x2x300x64 f16 packed=500", false),
    ] {
        let problem: Problem = text.parse().unwrap();
        let plan = Plan::with_schedule(&problem.backward(), &hardware, schedule);
        assert_eq!(plan.is_ok(), possible, "{text}: {plan:?}");
    }
}
