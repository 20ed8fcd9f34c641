#!/usr/bin/env python3
r"""Writes the golden pairs of the reward rule `math`: reference, response, and Math-Verify's verdict.

    python3 -m venv /tmp/math-verify && /tmp/math-verify/bin/pip install 'math-verify==0.9.0' 'latex2sympy2_extended==1.11.0' 'sympy==1.14.0'
    /tmp/math-verify/bin/python scripts/math_verify_pairs.py verl-stages/tests/golden/math_verify.json

A response is parsed as `math_verify.parse` does by default. A reference without a box or dollars is put into a box, as
verl and TRL do, since Math-Verify otherwise reads plain numbers only. `verify(gold, answer)` is the verdict.
"""

import json
import sys
from importlib.metadata import version

from math_verify import parse, verify


def box(answer):
    return "$\\boxed{" + answer + "}$"


# form -> reference -> (answers, put into a box, that Math-Verify was expected to accept; answers that are wrong)
BOXED = {
    "integers": {
        r"18": (["18", "18.0", "18.00", "+18", r"\$18", r"18\text{ eggs}", "36/2", r"\frac{36}{2}", "9 \\cdot 2", "20-2", "(18)", r"\text{18}", r"\mathbf{18}", "018"],
                ["-18", "19", "1.8", "180", "18.5", "18, 19", "81", r"18\pi", "18x", "1 8", r"\sqrt{18}", "18^2", "18!", "|-19|"]),
        r"-7": (["-7", "−7", "- 7", "-7.0", r"-\frac{14}{2}", "(-7)", "3-10"], ["7", "-8", "7-", "|-7|"]),
        r"0": (["0", "0.0", "-0", "1-1", r"0\%"], ["1", r"\emptyset", "0.1", "o"]),
        r"1000": (["1,000", "1{,}000", "1000", r"1\,000", r"10^3", "1000.00", r"\$1,000", r"1.0 \times 10^{3}"], ["1", "100", "10000", "1,00", r"10^{-3}"]),
        r"1{,}234{,}567": (["1234567", "1,234,567", r"1\,234\,567"], ["1234", "234567", "1,234,568"]),
        r"123456789012345678901234567890": (["123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890"], ["123456789012345678901234567891", r"1.2345678901234568 \times 10^{29}"]),
        r"2^{10}": (["1024", "2^{10}", "4^5", r"2^5 \cdot 2^5"], ["1023", "2^{11}", "210", "20"]),
        r"5!": (["120", "5!", r"5 \cdot 4!"], ["5", "24"]),
        r"10": ([r"\binom{5}{2}", r"\lfloor 10.5 \rfloor", r"\lceil 9.1 \rceil", r"|-10|", r"\sqrt{100}", r"\max(3, 10)"], [r"\binom{5}{1}", r"\lfloor 9.9 \rfloor"]),
    },
    "fractions": {
        r"\frac{1}{2}": ([r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac{1}{2}", r"\frac12", "1/2", "0.5", "0.50", ".5", r"\frac{2}{4}", r"50\%", "2^{-1}", r"1 \div 2", r"\left(\frac{1}{2}\right)", r"{1}/{2}", r"\frac{1}{2}\text{ cup}"],
                         [r"\frac{2}{1}", "2", "1.2", "12", r"\frac{1}{3}", r"-\frac{1}{2}", "0.51", "0.499999", r"\frac{1}{2}x", "1:3"]),
        r"-\frac{3}{4}": ([r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-0.75", "-3/4", r"-\frac34"], [r"\frac{3}{4}", "0.75", r"\frac{-4}{3}", r"\frac{-3}{-4}"]),
        r"2\frac{1}{2}": (["2.5", "5/2", r"\frac{5}{2}", r"2\frac12", r"2 \frac{1}{2}"], ["1", r"2\cdot\frac{1}{2}", "2.12", r"\frac{21}{2}"]),
        r"-1\frac{1}{2}": ([r"-1\frac{1}{2}", "-1.5", r"-\frac32"], ["-0.5", "1.5", r"-\frac{1}{2}"]),
        r"\frac{1}{3}": (["1/3", r"\frac{2}{6}", "0.333333", "0.3333333333", r"0.33333333"], ["0.33", "0.3334", "0.333", r"\frac{1}{4}", "3"]),
        r"\frac{22}{7}": (["22/7", "3.142857", r"3\frac{1}{7}"], [r"\pi", "3.14", "3.142"]),
        r"\frac{a}{b}": ([r"\frac{a}{b}", "a/b", r"a b^{-1}", r"\frac{2a}{2b}"], [r"\frac{b}{a}", "ab", "a-b", r"\frac{a}{c}"]),
        r"\frac{x+1}{x-1}": ([r"\frac{x+1}{x-1}", "(x+1)/(x-1)", r"1+\frac{2}{x-1}", r"\frac{-x-1}{1-x}"], ["x+1/x-1", r"\frac{x-1}{x+1}", r"\frac{x+1}{x+1}", "-1"]),
    },
    "decimals": {
        r"0.1": (["0.1", r"\frac{1}{10}", "10\\%", ".10", r"10^{-1}"], ["0.01", "0.11", "1", "0.100001"]),
        r"3.14": (["3.14", r"\frac{157}{50}", "3.140"], [r"\pi", "3.141", "314", "3.1"]),
        r"2.718281828": (["2.718281828", "2.7182818", "e"], ["2.718", "2.71829"]),
        r"0.000001": ([r"10^{-6}", r"1 \times 10^{-6}", "0.0000010"], ["0", "0.00001", "0.000002"]),
        r"6.02 \times 10^{23}": ([r"6.02 \times 10^{23}", r"6.02\cdot 10^{23}", "602000000000000000000000", r"60.2 \times 10^{22}"], [r"6.02 \times 10^{22}", r"6.2 \times 10^{23}", r"6.02 \times 10^{-23}"]),
        r"12.5": (["12.5", r"\frac{25}{2}", r"12\frac{1}{2}", "12.50"], ["12.05", "125", r"1.25"]),
    },
    "percent": {
        r"50\%": ([r"50\%", "0.5", r"\frac{1}{2}", "50", r"50 \%", r"50\text{ percent}", "50 percent"], [r"5\%", "500", r"0.5\%", "0.05"]),
        r"9": ([r"9\%", "9"], [r"90\%", r"0.9\%"]),
        r"12.5\%": ([r"12.5\%", "0.125", r"\frac{1}{8}"], ["1.25", r"1.25\%"]),
        r"0.5": ([r"50\%"], [r"0.05\%", r"5\%"]),
    },
    "radicals": {
        r"2\sqrt{2}": ([r"2\sqrt{2}", r"\sqrt{8}", r"2 \cdot \sqrt{2}", r"\sqrt{2} \cdot 2", r"\frac{4}{\sqrt{2}}", r"2^{3/2}", r"2^{1.5}", r"8^{\frac{1}{2}}", r"\sqrt 8", r"2\sqrt2", "2.828427"],
                       [r"\sqrt{2}", r"2\sqrt{3}", r"\sqrt{4}", "2.83", r"-2\sqrt{2}", r"2+\sqrt{2}", r"\sqrt{22}"]),
        r"\sqrt[3]{2}": ([r"\sqrt[3]{2}", r"2^{1/3}", r"2^{\frac{1}{3}}"], [r"\sqrt{2}", r"3\sqrt{2}", r"\sqrt[3]{3}", r"2^3"]),
        r"1+\sqrt{2}": ([r"1+\sqrt{2}", r"\sqrt{2}+1", r"\sqrt{3+2\sqrt{2}}", r"\frac{1}{\sqrt{2}-1}"], [r"1-\sqrt{2}", r"\sqrt{3}", r"\sqrt{2}-1"]),
        r"\frac{\sqrt{3}}{3}": ([r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}", r"\sqrt{\frac{1}{3}}", r"\frac{\sqrt3}3"], [r"\sqrt{3}", r"\frac{\sqrt{3}}{2}", r"\frac{3}{\sqrt{3}}"]),
        r"\sqrt{x^2+1}": ([r"\sqrt{x^2+1}", r"(x^2+1)^{1/2}", r"\sqrt{1+x^2}"], ["x+1", r"\sqrt{x^2-1}", r"\sqrt{x+1}"]),
        r"\frac{1+\sqrt{5}}{2}": ([r"\frac{1+\sqrt5}{2}", r"\frac12+\frac{\sqrt5}{2}", r"0.5(1+\sqrt{5})"], [r"\frac{1-\sqrt{5}}{2}", r"1+\frac{\sqrt5}{2}", "1.618"]),
    },
    "constants and functions": {
        r"\pi": ([r"\pi", "π", r"\frac{2\pi}{2}", r"3.141593", r"180\cdot\frac{\pi}{180}"], ["3.14", "3", r"2\pi", r"\frac{22}{7}", "p"]),
        r"12\pi": ([r"12\pi", r"12 \pi", r"4 \cdot 3\pi", r"12\pi\text{ cm}^2", r"\pi \cdot 12"], ["12", r"12+\pi", r"\frac{12}{\pi}", r"12\pi^2", "37.7"]),
        r"e^2": (["e^2", "e^{2}", r"e \cdot e", r"\exp(2)"], ["2e", "e", "e^{-2}", "7.39"]),
        r"\ln 2": ([r"\ln 2", r"\ln(2)", r"\frac{1}{2}\ln 4", r"-\ln\frac{1}{2}", r"\ln 6 - \ln 3"], [r"\ln 3", r"\log_2 e", "0.69", r"\log_{10} 2"]),
        r"3": ([r"\log_2 8", r"\log_{2}{8}", r"\ln e^3", r"\sqrt[3]{27}", r"\log_{10} 1000", r"3\cos 0"], [r"\log_2 9", r"\log_3 8"]),
        r"\frac{\sqrt{3}}{2}": ([r"\sin 60^\circ", r"\sin\frac{\pi}{3}", r"\cos\frac{\pi}{6}", r"\sin(\pi/3)"], [r"\sin\frac{\pi}{6}", r"\cos\frac{\pi}{3}", r"\tan\frac{\pi}{3}"]),
        r"\sin^2 x": ([r"\sin^2 x", r"\sin^2(x)", r"(\sin x)^2", r"1-\cos^2 x", r"\frac{1-\cos 2x}{2}"], [r"\sin x^2", r"\cos^2 x", r"2 \sin x"]),
        r"\frac{\pi}{4}": ([r"\arctan 1", r"\tan^{-1}(1)", r"\frac{1}{4}\pi", r"0.25\pi", r"45^\circ"], [r"\arctan 2", r"4\pi", "45", r"\arcsin 1"]),
        r"90^\circ": (["90", r"90^\circ", r"90^{\circ}", r"90\text{ degrees}", "90°"], ["9", r"\frac{\pi}{3}", r"180^\circ"]),
        r"\infty": ([r"\infty", r"+\infty", r"\text{infinity}", "infinity"], [r"-\infty", "0"]),
    },
    "expressions": {
        r"x^2+2x+1": (["x^2+2x+1", "(x+1)^2", "1+2x+x^2", "x^2 + 2 x + 1", r"x(x+2)+1", r"(x+1)(x+1)", "x^{2}+2x+1", "x*x+2*x+1"], ["x^2+2x-1", "x^2+1", "(x-1)^2", "y^2+2y+1", "x^2+2x", "x^2+2x+1.001", "(x+1)^3"]),
        r"(x-3)(x+2)": (["x^2-x-6", "(x+2)(x-3)", r"(x-3)\cdot(x+2)", "-(3-x)(x+2)"], ["(x+3)(x-2)", "x^2+x-6", "(x-3)"]),
        r"2x+3y": (["2x+3y", "3y+2x", r"2\cdot x+3\cdot y"], ["3x+2y", "2x-3y", "5xy", "2x+3z"]),
        r"a^2-b^2": (["(a-b)(a+b)", "a^2-b^2", "-(b^2-a^2)"], ["(a-b)^2", "b^2-a^2", "a^2+b^2"]),
        r"\frac{n(n+1)}{2}": ([r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac12 n(n+1)", "n(n+1)/2", r"\binom{n+1}{2}"], [r"\frac{n(n-1)}{2}", "n(n+1)", r"\frac{n+1}{2}"]),
        r"2^n": (["2^n", "2^{n}", r"2 \cdot 2^{n-1}"], ["n^2", "2n", "2^{n+1}", "2^{-n}"]),
        r"x_1+x_2": (["x_1+x_2", "x_{1}+x_{2}", "x_2+x_1"], ["x_1+x_3", "x_1-x_2", "x_{12}"]),
        r"3e^{2x}": (["3e^{2x}", r"3 \cdot e^{2x}", r"3(e^x)^2"], ["3e^{x}", "e^{2x}", "3e^2x"]),
        r"\frac{1}{x}+\frac{1}{y}": ([r"\frac{x+y}{xy}", r"\frac{1}{y}+\frac{1}{x}"], [r"\frac{1}{x+y}", r"\frac{2}{x+y}"]),
        r"|x|": (["|x|", r"\sqrt{x^2}", "|-x|", r"\left|x\right|"], ["x", "-x"]),
        r"\alpha+\beta": ([r"\alpha+\beta", r"\beta+\alpha"], [r"\alpha-\beta", "a+b"]),
        r"9-4\sqrt{5}": ([r"9-4\sqrt{5}", r"(2-\sqrt{5})^2", r"-4\sqrt5+9"], [r"9+4\sqrt{5}", r"(2+\sqrt{5})^2", r"5\sqrt{5}"]),
    },
    "complex numbers": {
        r"3+4i": (["3+4i", "4i+3", "3 + 4 i", r"(2+i)^2"], ["3-4i", "4+3i", "5", "3+4", "-3+4i"]),
        r"i": (["i", r"\sqrt{-1}", "i^5"], ["-i", "1", "i^2"]),
        r"-1": (["i^2", "-1", r"e^{i\pi}"], ["i", "1"]),
    },
    "sets and lists": {
        r"\{1,2,3\}": ([r"\{1,2,3\}", r"\{3,2,1\}", "1,2,3", "3, 1, 2", r"\{1, 2, 3, 3\}", r"\left\{1,2,3\right\}", r"1, 2, \text{ and } 3", r"\{1.0,2,3\}"], [r"\{1,2\}", r"\{1,2,4\}", r"\{1,2,3,4\}", "1,2", "123", "6"]),
        r"1,2": (["1,2", "2,1", r"\{1,2\}", "(1,2)", "1 \\text{ and } 2", "1, 2", "x=1, x=2", "1;2"], ["1", "2", "1,3", "12", "[1,2]", "1.2"]),
        r"\{\frac{1}{2},\sqrt{2}\}": ([r"\{0.5,\sqrt{2}\}", r"\{\sqrt2, \frac12\}"], [r"\{\frac12,2\}", r"\{\frac12\}"]),
        r"\emptyset": ([r"\emptyset", r"\{\}", r"\varnothing"], ["0", r"\{0\}", r"\{\emptyset\}"]),
        r"\pm 2": ([r"\pm 2", "2,-2", "-2, 2", r"\{2,-2\}"], ["2", "-2", r"\pm 3", "4"]),
        r"1\pm\sqrt{2}": ([r"1\pm\sqrt{2}", r"1+\sqrt{2},1-\sqrt{2}", r"\{1-\sqrt2,1+\sqrt2\}"], [r"1+\sqrt{2}", r"-1\pm\sqrt{2}", r"1\pm\sqrt{3}"]),
        r"x=1 \text{ or } x=2": (["x=1, x=2", "1,2", r"x=2 \text{ or } x=1", r"\{1,2\}"], ["x=1", "x=1, x=3"]),
    },
    "tuples": {
        r"(1,2)": (["(1,2)", "(1, 2)", r"\left(1,2\right)", "(1.0,2.0)", "(x,y)=(1,2)"], ["(2,1)", "(1,3)", "(1,2,3)", "[1,2]", "(1)", "(-1,2)"]),
        r"(3,-1)": (["(3,-1)", r"\left( 3, -1 \right)"], ["(-1,3)", "(3,1)", "(3,-1,0)"]),
        r"(1,2,3)": (["(1,2,3)", r"(1, 2, \frac{6}{2})"], ["(1,3,2)", "(1,2)", "(1,2,4)", "(3,2,1)"]),
        r"\left(\frac{1}{2},\sqrt{3}\right)": ([r"(0.5,\sqrt3)", r"\left(\frac12,\sqrt{3}\right)"], [r"(\sqrt{3},\frac12)", r"(\frac12,-\sqrt{3})"]),
        r"(1,2),(3,4)": (["(1,2),(3,4)", "(3,4),(1,2)", r"\{(1,2),(3,4)\}"], ["(2,1),(3,4)", "(1,2)", "(1,2),(4,3)"]),
        r"(a,b)": (["(a,b)"], ["(b,a)", "(a,c)"]),
    },
    "intervals": {
        r"[0,1)": (["[0,1)", r"\left[0,1\right)", "[0, 1.0)", r"[0,\frac{2}{2})"], ["(0,1]", "[0,1]", "(0,1)", "[0,2)", "[1,0)", r"\{0,1\}"]),
        r"(-\infty,3]": ([r"(-\infty,3]", r"\left(-\infty,3\right]", r"(-\infty, 3]"], [r"(-\infty,3)", r"[3,\infty)", r"(\infty,3]", r"(-\infty,-3]"]),
        r"(-\infty,0)\cup(0,\infty)": ([r"(-\infty,0)\cup(0,\infty)", r"(0,\infty)\cup(-\infty,0)", r"\left(-\infty,0\right) \cup \left(0,\infty\right)", r"\mathbb{R}\setminus\{0\}"], [r"(-\infty,\infty)", r"(-\infty,0]\cup(0,\infty)", r"(0,\infty)", r"\mathbb{R}"]),
        r"[1,2]\cup[3,4]": ([r"[1,2]\cup[3,4]", r"[3,4]\cup[1,2]"], ["[1,4]", r"[1,2]\cup[3,5]", r"[1,2)\cup[3,4]", r"[1,2]\cap[3,4]"]),
        r"[1,4]": ([r"[1,3]\cup[2,4]", r"[1,2]\cup[2,4]", r"[0,4]\cap[1,5]"], [r"[1,2)\cup(2,4]"]),
        r"\mathbb{R}": ([r"\mathbb{R}", r"(-\infty,\infty)"], [r"\mathbb{Z}", r"[0,\infty)"]),
        r"[-\sqrt{2},\sqrt{2}]": ([r"[-\sqrt{2},\sqrt{2}]", r"[-\sqrt2,\frac{2}{\sqrt2}]"], [r"[\sqrt2,-\sqrt2]", r"(-\sqrt2,\sqrt2)"]),
    },
    "equations": {
        r"x=3": (["x=3", "3", "x = 3.0", "x = 2+1 = 3", r"x = \frac{6}{2}", "2x=6"], ["y=3", "x=4", "-3", "x=-3", "x<3", r"x \ne 3"]),
        r"3": (["x=3", "y = 3", "x+1 = 3"], ["x = 4", "3 = x"]),
        r"y=2x+1": (["y=2x+1", "2x+1", "y = 1+2x", "2x-y+1=0", "y-1=2x"], ["y=2x-1", "2x-1", "y=2x", "x=2y+1"]),
        r"x^2+y^2=1": (["x^2+y^2=1", "x^2+y^2-1=0", "y^2 = 1-x^2", "2x^2+2y^2=2"], ["x^2-y^2=1", "x^2+y^2=2", "x^2+y^2"]),
        r"f(x)=x^2": (["f(x)=x^2", "x^2"], ["f(x)=x^3", "x"]),
        r"x=1,y=2": (["x=1,y=2", "x=1, y=2", "y=2, x=1"], ["x=2,y=1", "x=1"]),
    },
    "inequalities": {
        r"x>2": (["x>2", "2<x", r"(2,\infty)", r"x \gt 2", "2x>4"], [r"x\geq 2", "x<2", "2>x", r"[2,\infty)", r"(-\infty,2)", "2"]),
        r"x \le 3": ([r"x\leq 3", r"x \leqslant 3", r"3 \ge x", r"(-\infty,3]", "x≤3"], ["x<3", r"x\ge 3", r"(-\infty,3)"]),
        r"1<x<2": (["1<x<2", "(1,2)", "1 < x < 2", r"2>x>1"], [r"1\le x<2", "1<x<3", r"(1,2]", r"[1,2)", "x<2"]),
        r"-1 \le x \le 1": ([r"-1\leq x\leq 1", "[-1,1]"], [r"-1<x<1", "(-1,1)", r"-1 \le y \le 1"]),
        r"(1,2)": (["1<x<2"], ["1<x<3"]),
        r"x \ne 0": ([r"x\neq 0", r"x \ne 0"], ["x=0", r"x \ne 1"]),
    },
    "matrices": {
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": ([r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}", r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]"],
                                                [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&2&3&4\end{pmatrix}"]),
        r"\begin{pmatrix}-1\\\frac12\end{pmatrix}": ([r"\begin{pmatrix}-1\\0.5\end{pmatrix}", r"\begin{pmatrix}-1 \\ 1/2\end{pmatrix}"], [r"\begin{pmatrix}1\\0.5\end{pmatrix}", r"\begin{pmatrix}-1&0.5\end{pmatrix}"]),
    },
    "texts and choices": {
        r"A": (["A", "(A)", r"\text{A}", r"\text{(A)}", r"\textbf{(A)}", r"\mathrm{A}", "a"], ["B", r"\text{B}", "AB", "(B)", "1"]),
        r"\text{(C)}": (["C", "(C)", r"\text{C}", r"\textbf{(C) }"], ["D", r"\text{(D)}"]),
        r"\text{Evelyn}": ([r"\text{Evelyn}", "Evelyn", r"\text{evelyn}", r"\mathrm{Evelyn}"], [r"\text{Carl}", r"\text{Eve}", "Evelynn"]),
        r"\text{no solution}": ([r"\text{no solution}", r"\text{No solution}"], [r"\text{one solution}", "0", r"\text{solution}"]),
        r"\text{even}": (["even", r"\text{even}"], ["odd", r"\text{odd}", "neven"]),
        r"\text{east}": ([r"\text{east}"], [r"\text{west}"]),
    },
    "units": {
        r"12\text{ cm}": (["12", r"12\text{ cm}", r"12\,\text{cm}", r"12 \mathrm{cm}", r"12\mbox{ cm}", "12 cm"], ["13", r"13\text{ cm}", r"1.2\text{ cm}"]),
        r"25": ([r"25\text{ m}^2", r"25\text{ cm}^3", r"25\text{ dollars}", r"25\text{ km/h}", "25 meters", "25 degrees", r"\$25", r"25\text{ square units}", r"25 \text{ feet per second}"], [r"52\text{ m}", r"2.5\text{ m}"]),
        r"\frac{3}{4}\text{ hours}": ([r"\frac34", r"0.75\text{ hours}", "3/4"], [r"\frac43\text{ hours}"]),
    },
    "precedence": {
        r"\frac{1}{2x}": (["1/2x", "1/(2x)", r"\frac{1}{2}x^{-1}"], [r"\frac{x}{2}", "2x"]),
        r"\frac{2}{3\pi}": ([r"2/3\pi", r"\frac{2}{3\pi}"], [r"\frac{2\pi}{3}"]),
        r"-4": (["-2^2", "-(2^2)"], ["(-2)^2", "4"]),
        r"\sin(2x)": ([r"\sin 2x", r"2\sin x\cos x", r"\sin{2x}"], [r"2\sin x", r"\sin^2 x", r"\sin 2"]),
        r"\log x": ([r"\log_{10} x", r"\frac{\ln x}{\ln 10}"], [r"\ln x", r"\log_2 x"]),
        r"2": ([r"\log 100", r"\log_3 9", r"\frac{\log 9}{\log 3}"], [r"\ln 100", r"\log 10"]),
        r"x\cdot y^2": (["xy^2", "y^2x", r"x\times y^2"], ["(xy)^2", "x^2y", "x+y^2"]),
        r"\frac{a}{bc}": (["a/(bc)", "a/bc"], ["a/b*c", r"\frac{ac}{b}"]),
        r"\frac{3}{4}": (["3:4", "3 : 4"], ["4:3"]),
    },
    "near misses": {
        r"\pi": ([], ["3.14159", r"\pi + 10^{-60}", r"\frac{355}{113}"]),
        r"262537412640768744": ([], [r"e^{\pi\sqrt{163}}"]),
        r"\sqrt{5}+\sqrt{6}": ([r"\sqrt{11+2\sqrt{30}}"], [r"\sqrt{11}", r"\sqrt{22}"]),
        r"0": ([], ["10^{-30}", "e^{-200}"]),
        r"0.0000001": (["10^{-7}"], ["0.0000002"]),
        r"18": (["18.0"], ["18.0000001", "17.9999999"]),
        r"1<x<2": (["1 < x < 2"], ["1,2"]),
        r"x^2": ([], ["x^2+10^{-20}", "x^{2.0000001}", r"x^2\cdot 1.0000001"]),
        r"\frac{1000000}{1000001}": ([r"\frac{2000000}{2000002}"], ["1", r"\frac{1000001}{1000002}"]),
        r"(0,1]": ([], ["(0,1)", "[0,1)", "[0,1]", "(0,2]", "(0;1)"]),
        r"\{1,2,3,4,5\}": ([r"\{5,4,3,2,1\}"], [r"\{1,2,3,4,6\}", r"\{1,2,3,4\}", r"\{1,2,3,4,-5\}"]),
        r"x+y": (["y+x"], ["x-y", "xy", "x+z", "X+Z", "x+y+1"]),
        r"a-b": (["-b+a", "-(b-a)"], ["b-a", "a+b"]),
        r"\cos x": ([r"\cos(-x)", r"\sin(x+\frac{\pi}{2})"], [r"\sin x", r"-\cos x", r"\cos 2x"]),
    },
    "systems and points": {
        r"x=1, y=2": (["x=1,y=2", "y=2,x=1"], ["x=2, y=1", "x=1, y=3", "2,1"]),
        r"(x,y)=(3,4)": (["(3,4)", "(x,y)=(3,4)"], ["(4,3)", "(x,y)=(4,3)"]),
        r"(-1,0),(2,3)": (["(2,3),(-1,0)", "(-1, 0) \\text{ and } (2, 3)"], ["(0,-1),(2,3)", "(-1,0),(3,2)", "(-1,0,2,3)"]),
        r"\left(\frac{\pi}{2}, 1\right)": ([r"(\frac{\pi}2, 1)", r"(0.5\pi, 1)"], [r"(1, \frac{\pi}{2})", r"(\pi, 1)"]),
    },
    "bases and repeating decimals": {
        r"1010_2": (["1010_2", "1010_{2}", "1010"], ["10", "1011_2"]),
        r"\frac{1}{3}": ([r"0.\overline{3}"], [r"0.\overline{33}4", r"0.3\overline{4}"]),
    },
    "roots and logarithms of variables": {
        r"\ln(x^2)": (["\\ln(x^2)"], [r"2\ln x"]),
        r"\sqrt{x}\sqrt{y}": ([r"\sqrt{y}\sqrt{x}"], [r"\sqrt{x+y}"]),
        r"-2": ([r"\sqrt[3]{-8}"], [r"\sqrt{4}", r"\sqrt[3]{8}"]),
        r"x^{1/3}": ([r"\sqrt[3]{x}"], [r"\sqrt{x}", "x^3"]),
        r"\frac{1}{1+e^{-x}}": ([r"\frac{e^x}{1+e^x}"], [r"\frac{e^x}{1-e^x}"]),
        r"\max(a,b)": ([r"\max(b,a)"], [r"\min(a,b)"]),
        r"n!": (["n(n-1)!", "n!"], ["(n-1)!", "n(n+1)!", "(n+1)!"]),
        r"x=\frac{y}{2}": (["y=2x"], ["y=x/2"]),
        r"x^2\ge 4": ([r"x^2-4\ge 0"], [r"x^2-4\le 0", r"x\ge 2"]),
    },
    "units that are letters": {
        r"5": (["5m", "5 m", r"5\text{ m/s}^2"], ["5x", "5n"]),
        r"2c": (["2c"], ["2", "3c"]),
    },
    "layout": {
        r"\frac{3}{4}": ([r"\;\frac{3}{4}", r"\displaystyle\frac{3}{4}", r"\frac{3}{4}.", r"\frac{3}{4}\,", r"\left\frac{3}{4}\right.", r"\frac {3} {4}", r"\cfrac{3}{4}", r"\frac 3 4", r"{\frac{3}{4}}", r"\boxed{\frac{3}{4}}", r"$\frac{3}{4}$"], [r"\frac{4}{3}", r"\frac{3}{4}+1"]),
        r"x^{10}": ([r"x^{10}", r"{x}^{10}", "x**{10}", r"x^{5}\cdot x^{5}"], ["x^10", "x^1 0", "x^{1}0"]),
    },
}

# Whole responses: reference -> (responses that are right, responses that are wrong)
WHOLE = {
    "18": ([
        "The answer is 18.", "So she has $18$ eggs.", "The final answer is $18$. I hope it is correct.", "Answer: 18", "**Answer:** 18", r"Thus \(18\).", r"\[x = 18\]",
        r"First \boxed{17}. Checking again, that was wrong by one, so the result is \boxed{18}.", r"\boxed{18} is the answer to the question that has the number 5.",
        "2 + 3 = 5 and 5 + 13 = 18", "It costs $18", "18", "Step 1: 20 - 2 = 18", "#### 18", "#### 18 eggs", r"$\boxed{18}$", r"\boxed{\boxed{18}}", r"\fbox{18}", r"\boxed {18}", r"The answer is \boxed{18\text{ eggs}}.", "The answer is 1.8e1", "The answer to the question is: 18 apples.", "answer = 18", "The final answer is 18", r"The final answer is \boxed{18}. I hope it is correct.", "Answer: **18**", "**Final Answer**\n\n$$18$$", r"\boxed{17}? No: \boxed{18}", r"Put it in \boxed{}: \boxed{18}.", r"\boxed{18} Remember to use \boxed{}.", r"\boxed{18", "The result is 36/2",
    ], [
        "The answer is 19.", r"\boxed{17}", r"First \boxed{18}. Checking again, that was wrong by one, so the result is \boxed{17}.", r"\boxed{18}, \boxed{19}", "", "no idea", r"\boxed{}", "eighteen", "It is 18 or 19",
        "18 is not the answer; it is 20", "The answer is not 18.", "The answer is 18 or 19.", "It is not 18.", "The answer is 19. I had 18 before.", r"Is it \boxed{18}? No. The final answer is $19$.", r"\boxed{19} (not 18)", r"$18$ or $19$", r"\boxed{\neq 18}", r"\boxed{>18}", r"\boxed{18+1}", "#### 19\nnot 18 as first thought", r"The answer is \boxed{\text{18 or 19}}", r"\boxed{18 \text{ or } 19}", r"\boxed{18}\boxed{19}",
    ]),
    r"\frac{1}{2}": ([r"The probability is $\frac{1}{2}$.", "The probability is 1/2", "The answer is 0.5", r"The answer is $\dfrac{1}{2}$ or 50\%.", r"so $p = \frac{1}{2}$"], ["The answer is 2", r"$\frac{1}{3}$"]),
    r"(1,2)": ([r"The point is $(1,2)$.", r"\boxed{(1, 2)}", r"The answer is $x=1$, $y=2$" ], [r"The point is $(2,1)$."]),
    r"1,2": ([r"The solutions are $1$ and $2$.", r"\boxed{1} and \boxed{2}", r"$x=\boxed{1}$ or $x=\boxed{2}$", r"$\boxed{1, 2}$"], [r"\boxed{1}", r"The solutions are $1$ and $3$.", r"\boxed{2}"]),
    r"x^2+1": ([r"So $f(x) = x^2+1$.", r"The final answer is $x^2 + 1$", r"\boxed{x^2+1}"], [r"$x^2-1$", "x^2"]),
    r"Let $a=2$. Then the answer is $\boxed{\frac{a}{4}=\frac{1}{2}}$.": ([r"\boxed{\frac12}"], [r"\boxed{2}"]),
    "$18$": (["18", r"\boxed{18}"], ["19"]),
}


def verdict(reference, response):
    plain = not any(mark in reference for mark in ("\\boxed", "$", "\\(", "\\["))
    gold = parse(box(reference) if plain else reference)
    return bool(verify(gold, parse(response)))


def main(path):
    pairs = []
    for form, references in BOXED.items():
        for reference, answers in references.items():
            for meant, some in zip((True, False), answers):
                pairs += [(form, reference, box(answer), meant) for answer in some]
    for reference, responses in WHOLE.items():
        for meant, some in zip((True, False), responses):
            pairs += [("responses", reference, response, meant) for response in some]
    rows = []
    for form, reference, response, meant in pairs:
        accepted = verdict(reference, response)
        rows.append({"form": form, "reference": reference, "response": response, "meant": meant, "math_verify": accepted})
    packages = {name: version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")}
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"packages": ' + json.dumps(packages) + ',\n"pairs": [\n')
        file.write(",\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
        file.write("\n]}\n")
    print(f"{len(rows)} pairs, {sum(row['math_verify'] for row in rows)} accepted")
    for row in rows:
        if row["meant"] != row["math_verify"]:
            print(f"meant {row['meant']}: {row['reference']}  <-  {row['response']}")


if __name__ == "__main__":
    main(sys.argv[1])
