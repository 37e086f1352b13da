//! `flashcore ceilings`: the highest rates this machine can reach.

use clap::Args;

use super::{Place, Task};
use crate::cli::screen::{Progress, say};
use crate::cli::{Exit, Json};
use crate::evidence::{Environment, now, schemas};
use crate::stats::MARGIN;

#[derive(Args)]
#[command(after_help = "\
They are kept for this machine, and from then on flashcore bench shows times as fractions of them.")]
pub struct Options {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    json: Json,
}

pub fn ceilings(options: &Options) -> Result<Exit, String> {
    options.json.check()?;
    let environment = Environment::read();
    let mut progress = Progress::new(1);
    let task = Task::new(Vec::new(), &options.place, MARGIN);
    let mut bench = task.start(&environment, &mut |what| progress.at(0, what))?;
    progress.at(0, "measuring what the machine can do at most");
    let found = bench.measure_ceilings(&now())?;
    progress.finish();
    let rate = |rate: Option<f64>, unit: &str| {
        rate.map_or_else(|| "not measured".into(), |rate| format!("{rate:.3} {unit}"))
    };
    say(&format!("the ceilings of {}", found.machine));
    say(&format!("  products      {}", rate(found.matmul_tflops, "TFLOP/s")));
    say(&format!("  memory        {}", rate(found.memory_gbytes, "GB/s")));
    say(&format!("  exponentials  {}", rate(found.exp_gops, "G/s")));
    if found.launch_us.is_some() {
        let (call, host) = (rate(found.launch_us, "µs"), rate(found.launch_host_us, "µs"));
        say(&format!("  empty launch  {call} by the call clock, {host} of the host's"));
    }
    match found.keep() {
        Ok(path) => say(&format!("kept in {}", path.display())),
        Err(why) => say(&why),
    }
    options.json.write(schemas::CEILINGS, &environment, true, found)?;
    Ok(Exit::Pass)
}
