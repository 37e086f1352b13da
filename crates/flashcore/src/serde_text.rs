//! Problems, dtypes and masks for serde: each is written as the text that it prints, and read back from it.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{DType, Mask, Problem};

macro_rules! as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

as_text!(Problem, DType, Mask);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let problem = Problem::new(2, 8, 512, 64, DType::BF16)
            .with_kv(2, 600)
            .with_mask(Mask::Window { left: Some(3), right: None })
            .with_scale(0.1)
            .with_lse();
        let text = serde_json::to_string(&problem).unwrap();
        assert_eq!(text, format!("\"{problem}\""));
        assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), problem);
        for mask in [Mask::None, Mask::Causal, Mask::CausalTopLeft] {
            let text = serde_json::to_string(&(mask, DType::F32)).unwrap();
            assert_eq!(serde_json::from_str::<(Mask, DType)>(&text).unwrap(), (mask, DType::F32));
        }
    }

    #[test]
    fn a_wrong_text_is_refused_with_the_reason() {
        let refused = serde_json::from_str::<DType>("\"f12\"").unwrap_err();
        assert!(refused.to_string().contains("'f12'"), "{refused}");
        assert!(serde_json::from_str::<Problem>("\"1x8x0\"").is_err());
    }
}
