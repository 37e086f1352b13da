//! What a machine cannot do: gates between a clock and a report.
//!
//! A time is wrong more often than a record is broken. A rate above the peak of the machine, a clock that counts less
//! than the wall, a time of zero: each is an error of the measurement, and none of them becomes a result.

use std::time::Duration;

/// A rate above this share of a data sheet's peak is an error of the clock or of the count.
pub const ABOVE_PEAK: f64 = 1.02;
/// The same where the peak was measured, and so has some noise of its own.
pub const ABOVE_MEASURED: f64 = 1.05;
/// A rate below this share of the peak says that the launch is timed rather than the arithmetic.
pub const LAUNCH_BOUND: f64 = 0.01;
/// What the wall may count in excess of a clock: launches, pipes and a busy host, but not another call for each.
const WALL_EXCESS: f64 = 1.7;
/// How long the wall is watched for.
pub const WALL_WATCH: Duration = Duration::from_millis(30);
/// How often the wall may be watched again: a host that is busy can only make it longer.
const WALL_TRIES: usize = 5;

/// A time in microseconds, unless it is none: what was not measured is never zero.
pub fn time(us: f64) -> Result<f64, String> {
    if us.is_finite() && us > 0.0 { Ok(us) } else { Err(format!("{us} µs is no time; it was not measured")) }
}

/// What a rate says by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// There is no rate, or no peak to hold it against.
    Unknown,
    /// So low that a launch is timed, not the arithmetic.
    LaunchBound,
    /// Nothing speaks against it.
    Possible,
    /// Above what the machine can do: the measurement is wrong.
    Impossible,
}

/// Judges a rate by the peak, in the same unit; `slack` is the share of the peak that is still believed.
pub fn rate(rate: Option<f64>, peak: Option<f64>, slack: f64) -> Rate {
    match rate.zip(peak).map(|(rate, peak)| rate / peak) {
        Some(share) if share > slack => Rate::Impossible,
        Some(share) if share < LAUNCH_BOUND => Rate::LaunchBound,
        Some(share) if share.is_finite() => Rate::Possible,
        _ => Rate::Unknown,
    }
}

/// Holds a clock against the wall: `watch` runs calls that take `claimed_us` in all by the clock, and returns what the
/// wall counted. A time that was divided by something, such as the batch, cannot hide from it.
pub fn clock_against_wall(
    claimed_us: f64,
    mut watch: impl FnMut() -> Result<f64, String>,
) -> Result<(), String> {
    let mut least = f64::INFINITY;
    for _ in 0..WALL_TRIES {
        least = least.min(watch()?);
        if least <= WALL_EXCESS * claimed_us {
            return Ok(());
        }
    }
    Err(format!(
        "its clock counts {:.1} ms where the wall counts {:.1} ms: the time was divided by something",
        claimed_us / 1e3,
        least / 1e3
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_above_the_peak_is_an_error_and_one_below_a_hundredth_is_a_launch() {
        let of = |share: f64| rate(Some(share * 989.0), Some(989.0), ABOVE_PEAK);
        assert_eq!([of(1.03), of(3.0), of(f64::INFINITY)], [Rate::Impossible; 3]);
        assert_eq!([of(1.0), of(0.7), of(0.01)], [Rate::Possible; 3]);
        assert_eq!(of(0.009), Rate::LaunchBound);
    }

    #[test]
    fn without_a_rate_or_a_peak_nothing_is_said() {
        assert_eq!(rate(None, Some(989.0), ABOVE_PEAK), Rate::Unknown);
        assert_eq!(rate(Some(5000.0), None, ABOVE_PEAK), Rate::Unknown);
        assert_eq!(rate(Some(f64::NAN), Some(989.0), ABOVE_PEAK), Rate::Unknown);
    }

    #[test]
    fn a_time_divided_by_the_batch_is_found_out_by_the_wall_even_where_its_rate_is_possible() {
        for batch in [2.0, 4.0, 16.0] {
            let why = clock_against_wall(30e3 / batch, || Ok(30.5e3)).unwrap_err();
            assert!(why.contains("divided by something"), "{why}");
        }
    }

    #[test]
    fn a_host_that_is_busy_now_and_then_accuses_nobody() {
        let mut walls = [90e3, 70e3, 31e3].into_iter();
        assert_eq!(clock_against_wall(30e3, || Ok(walls.next().unwrap())), Ok(()));
        assert_eq!(clock_against_wall(30e3, || Ok(10e3)), Ok(()), "a stopped wall proves nothing");
        assert_eq!(clock_against_wall(30e3, || Err("gone".into())), Err("gone".into()));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        assert_eq!(time(2.5), Ok(2.5));
        for none in [0.0, -3.0, f64::NAN, f64::INFINITY] {
            assert!(time(none).unwrap_err().contains("not measured"));
        }
    }
}
