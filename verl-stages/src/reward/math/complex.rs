//! Complex numbers over [`Real`], with the principal branches; roots of odd order of negative real numbers are real.

use super::real::{Real, Work};

/// A complex number.
#[derive(Debug, Clone)]
pub(super) struct Complex {
    pub(super) re: Real,
    pub(super) im: Real,
}

/// Trailing bits of a mantissa that may be pure rounding.
pub(super) const NOISE: u64 = 64;

impl Complex {
    pub(super) fn real(re: Real) -> Complex {
        Complex {
            re,
            im: Real::zero(),
        }
    }

    pub(super) fn is_real(&self) -> bool {
        self.im.is_zero()
    }

    fn negated(&self) -> Complex {
        Complex {
            re: self.re.negated(),
            im: self.im.negated(),
        }
    }

    /// The magnitude of the larger part.
    pub(super) fn magnitude(&self) -> i64 {
        self.re.magnitude().max(self.im.magnitude())
    }
}

impl Work {
    /// A complex number; its smaller part is dropped if it is only rounding compared with the larger one.
    fn snapped(&self, re: Real, im: Real) -> Complex {
        let noise = (self.bits - NOISE.min(self.bits)) as i64;
        if re.magnitude() - im.magnitude() > noise {
            return Complex::real(re);
        }
        if im.magnitude() - re.magnitude() > noise {
            return Complex {
                re: Real::zero(),
                im,
            };
        }
        Complex { re, im }
    }

    pub(super) fn c_integer(&self, value: i64) -> Complex {
        Complex::real(self.integer(value))
    }

    pub(super) fn c_add(&self, a: &Complex, b: &Complex) -> Option<Complex> {
        self.pay(1)?;
        Some(self.snapped(self.add(&a.re, &b.re), self.add(&a.im, &b.im)))
    }

    pub(super) fn c_sub(&self, a: &Complex, b: &Complex) -> Option<Complex> {
        self.c_add(a, &b.negated())
    }

    pub(super) fn c_mul(&self, a: &Complex, b: &Complex) -> Option<Complex> {
        self.pay(4)?;
        if a.is_real() && b.is_real() {
            return Some(Complex::real(self.mul(&a.re, &b.re)));
        }
        let re = self.sub(&self.mul(&a.re, &b.re), &self.mul(&a.im, &b.im));
        let im = self.add(&self.mul(&a.re, &b.im), &self.mul(&a.im, &b.re));
        Some(self.snapped(re, im))
    }

    /// `a / b`; `None` if `b` is 0 up to rounding.
    pub(super) fn c_div(&self, a: &Complex, b: &Complex) -> Option<Complex> {
        self.pay(8)?;
        if b.magnitude() < -((self.bits - NOISE.min(self.bits)) as i64) {
            return None;
        }
        if b.is_real() {
            return Some(Complex {
                re: self.div(&a.re, &b.re)?,
                im: self.div(&a.im, &b.re)?,
            });
        }
        let conjugate = Complex {
            re: b.re.clone(),
            im: b.im.negated(),
        };
        let below = self.add(&self.mul(&b.re, &b.re), &self.mul(&b.im, &b.im));
        let above = self.c_mul(a, &conjugate)?;
        Some(self.snapped(self.div(&above.re, &below)?, self.div(&above.im, &below)?))
    }

    pub(super) fn c_abs(&self, a: &Complex) -> Option<Real> {
        if a.is_real() {
            return Some(a.re.abs());
        }
        self.sqrt(&self.add(&self.mul(&a.re, &a.re), &self.mul(&a.im, &a.im)))
    }

    pub(super) fn c_exp(&self, a: &Complex) -> Option<Complex> {
        let size = self.exp(&a.re)?;
        if a.is_real() {
            return Some(Complex::real(size));
        }
        let (sin, cos) = self.sin_cos(&a.im)?;
        Some(self.snapped(self.mul(&size, &cos), self.mul(&size, &sin)))
    }

    /// The principal logarithm; `None` for 0.
    pub(super) fn c_ln(&self, a: &Complex) -> Option<Complex> {
        let size = self.c_abs(a)?;
        if size.is_zero() || size.magnitude() < -((self.bits - NOISE.min(self.bits)) as i64) {
            return None;
        }
        Some(Complex {
            re: self.ln(&size)?,
            im: self.angle(&a.re, &a.im)?,
        })
    }

    /// `a` to an integer power.
    pub(super) fn c_powi(&self, a: &Complex, power: i64) -> Option<Complex> {
        let mut result = self.c_integer(1);
        let mut square = a.clone();
        let mut left = power.unsigned_abs();
        while left > 0 {
            if left & 1 == 1 {
                result = self.c_mul(&result, &square)?;
            }
            left >>= 1;
            if left > 0 {
                square = self.c_mul(&square, &square)?;
            }
        }
        if power < 0 {
            return self.c_div(&self.c_integer(1), &result);
        }
        Some(result)
    }

    /// The root of order `order` (2 or more); for a negative real number and an odd order, the real root.
    pub(super) fn c_root(&self, a: &Complex, order: i64) -> Option<Complex> {
        if a.magnitude() <= i64::MIN / 8 {
            return Some(Complex::real(Real::zero()));
        }
        if order == 2 && a.is_real() {
            let root = self.sqrt(&a.re.abs())?;
            return Some(match a.re.is_negative() {
                false => Complex::real(root),
                true => Complex {
                    re: Real::zero(),
                    im: root,
                },
            });
        }
        if a.is_real() && a.re.is_negative() && order % 2 != 0 {
            return Some(self.c_root(&a.negated(), order)?.negated());
        }
        let ln = self.c_ln(a)?;
        self.c_exp(&self.c_div(&ln, &self.c_integer(order))?)
    }

    /// `a^b`; `None` for 0 to a power that is not positive.
    pub(super) fn c_pow(&self, a: &Complex, b: &Complex) -> Option<Complex> {
        if a.re.is_zero() && a.im.is_zero() {
            let positive = !b.re.is_negative() && !b.re.is_zero();
            return positive.then(|| Complex::real(Real::zero()));
        }
        self.c_exp(&self.c_mul(b, &self.c_ln(a)?)?)
    }

    pub(super) fn c_sin_cos(&self, a: &Complex) -> Option<(Complex, Complex)> {
        if a.is_real() {
            let (sin, cos) = self.sin_cos(&a.re)?;
            return Some((Complex::real(sin), Complex::real(cos)));
        }
        // e^(iz) and e^(-iz).
        let iz = Complex {
            re: a.im.negated(),
            im: a.re.clone(),
        };
        let (plus, minus) = (self.c_exp(&iz)?, self.c_exp(&iz.negated())?);
        let twice_i = Complex {
            re: Real::zero(),
            im: self.integer(2),
        };
        let sin = self.c_div(&self.c_sub(&plus, &minus)?, &twice_i)?;
        let cos = self.c_div(&self.c_add(&plus, &minus)?, &self.c_integer(2))?;
        Some((sin, cos))
    }

    /// Hyperbolic sine and cosine.
    pub(super) fn c_sinh_cosh(&self, a: &Complex) -> Option<(Complex, Complex)> {
        let (plus, minus) = (self.c_exp(a)?, self.c_exp(&a.negated())?);
        let two = self.c_integer(2);
        let sinh = self.c_div(&self.c_sub(&plus, &minus)?, &two)?;
        let cosh = self.c_div(&self.c_add(&plus, &minus)?, &two)?;
        Some((sinh, cosh))
    }

    /// The inverse tangent of a real number.
    pub(super) fn c_atan(&self, a: &Complex) -> Option<Complex> {
        a.is_real()
            .then(|| self.atan(&a.re))
            .flatten()
            .map(Complex::real)
    }

    /// The inverse sine of a real number from −1 to 1.
    pub(super) fn c_asin(&self, a: &Complex) -> Option<Complex> {
        let rest = self.sub(&self.integer(1), &self.mul(&a.re, &a.re));
        if !a.is_real() || rest.is_negative() {
            return None;
        }
        self.angle(&self.sqrt(&rest)?, &a.re).map(Complex::real)
    }
}
