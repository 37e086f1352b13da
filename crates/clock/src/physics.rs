//! What a machine cannot do: checks between a clock and a report.
//!
//! A surprising time is more often a wrong measurement than a new record. A rate above the peak of the machine, a clock
//! that counts less than the wall clock, a time of zero: each is a measurement error, and never becomes a result.

use std::time::Duration;

/// A rate above this share of a data sheet's peak is an error of the clock or of the count.
pub const ABOVE_PEAK: f64 = 1.02;
/// The same where the peak was measured, which has some noise of its own.
pub const ABOVE_MEASURED: f64 = 1.05;
/// Below this share of the peak, the time is that of the launch rather than of the arithmetic.
pub const LAUNCH_BOUND: f64 = 0.01;
/// By what factor the wall clock may exceed a clock: room for launches, pipes and a busy host, not for twice the calls.
const WALL_EXCESS: f64 = 1.7;
/// How long the wall clock is watched for.
pub const WALL_WATCH: Duration = Duration::from_millis(30);
/// How often the comparison is tried: a busy host can only make the wall time longer.
const WALL_TRIES: usize = 5;

/// A time in microseconds, or an error where it is not a positive number: what was not measured is never zero.
pub fn time(us: f64) -> Result<f64, String> {
    if us.is_finite() && us > 0.0 { Ok(us) } else { Err(format!("{us} µs is no time: it was not measured")) }
}

/// Whether a rate is plausible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// There is no rate, or no peak to compare it with.
    Unknown,
    /// So low that the time is that of the launch, not of the arithmetic.
    LaunchBound,
    /// Plausible.
    Possible,
    /// Above what the machine can do: the measurement is wrong.
    Impossible,
}

/// Judges a rate by the peak, in the same unit; above `slack` times the peak it is not believed.
pub fn rate(rate: Option<f64>, peak: Option<f64>, slack: f64) -> Rate {
    match rate.zip(peak).map(|(rate, peak)| rate / peak) {
        Some(share) if share > slack => Rate::Impossible,
        Some(share) if share < LAUNCH_BOUND => Rate::LaunchBound,
        Some(share) if share.is_finite() => Rate::Possible,
        _ => Rate::Unknown,
    }
}

/// Compares a clock with the wall clock: `watch` runs calls that take `claimed_us` in all by the clock, and returns
/// their wall time. This finds a time that was divided by something, such as the batch.
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
