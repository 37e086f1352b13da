//! Where candidates are computed and timed.

use flashcore_clock::timing::Effort;

/// Why there is no result.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    /// The result is wrong.
    Wrong(String),
    /// The device said why it does not run this.
    Refused(String),
    /// The worker crashed or hung.
    Lost(String),
}

impl Trouble {
    /// The message for the user.
    pub fn why(&self) -> &str {
        let (Trouble::Wrong(why) | Trouble::Refused(why) | Trouble::Lost(why)) = self;
        why
    }
}

/// Something that computes and times candidates. `data` selects the inputs: 0 are those of the search, every other
/// number gives fresh ones.
pub trait Device {
    /// Whether a candidate's result is right.
    fn parity(&mut self, candidate: &str, case: usize, data: u64) -> Result<(), Trouble>;

    /// Lets contenders take turns in rounds; returns the times of each, one per round.
    fn race(
        &mut self,
        contenders: &[&str],
        case: usize,
        data: u64,
        effort: &Effort,
        stop: &dyn Fn() -> bool,
    ) -> Vec<Result<Vec<f64>, Trouble>>;
}
