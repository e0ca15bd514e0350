package manifests

import (
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// problems collects validation errors. Its methods take a path, the value
// and one message per error, worded as upstream words them.
type problems struct{ list field.ErrorList }

func (p *problems) add(errs ...*field.Error) { p.list = append(p.list, errs...) }

func (p *problems) invalid(at *field.Path, value any, messages ...string) {
	for _, m := range messages {
		p.list = append(p.list, field.Invalid(at, value, m))
	}
}

func (p *problems) required(at *field.Path, detail string) {
	p.list = append(p.list, field.Required(at, detail))
}

func (p *problems) forbidden(at *field.Path, detail string) {
	p.list = append(p.list, field.Forbidden(at, detail))
}

func (p *problems) duplicate(at *field.Path, value any) {
	p.list = append(p.list, field.Duplicate(at, value))
}

func (p *problems) nonNegative(at *field.Path, v int64) {
	p.add(apivalidation.ValidateNonnegativeField(v, at)...)
}

func (p *problems) positive(at *field.Path, v int64) {
	if v <= 0 {
		p.invalid(at, v, "must be greater than zero")
	}
}

func (p *problems) immutable(at *field.Path, now, before any) {
	p.add(apivalidation.ValidateImmutableField(now, before, at)...)
}

// Syntax checks of single strings.

func (p *problems) dnsLabel(at *field.Path, v string) {
	p.invalid(at, v, validation.IsDNS1123Label(v)...)
}
func (p *problems) dnsSubdomain(at *field.Path, v string) {
	p.invalid(at, v, validation.IsDNS1123Subdomain(v)...)
}
func (p *problems) qualifiedName(at *field.Path, v string) {
	p.invalid(at, v, validation.IsQualifiedName(v)...)
}
func (p *problems) ip(at *field.Path, v string, old []string) {
	p.add(validation.IsValidIPForLegacyField(at, v, true, old)...)
}
func (p *problems) cidr(at *field.Path, v string, old []string) {
	p.add(validation.IsValidCIDRForLegacyField(at, v, true, old)...)
}
func (p *problems) portNumber(at *field.Path, v int32) {
	p.invalid(at, v, validation.IsValidPortNum(int(v))...)
}

func (p *problems) portNumberOrName(at *field.Path, v intstr.IntOrString) {
	if v.Type == intstr.Int {
		p.invalid(at, v.IntValue(), validation.IsValidPortNum(v.IntValue())...)
		return
	}
	p.invalid(at, v.StrVal, validation.IsValidPortName(v.StrVal)...)
}

func (p *problems) userID(at *field.Path, v *int64) {
	if v != nil {
		p.invalid(at, *v, validation.IsValidUserID(*v)...)
	}
}

func (p *problems) groupID(at *field.Path, v *int64) {
	if v != nil {
		p.invalid(at, *v, validation.IsValidGroupID(*v)...)
	}
}

func (p *problems) labels(at *field.Path, l map[string]string) {
	p.add(metavalidation.ValidateLabels(l, at)...)
}

func (p *problems) labelName(at *field.Path, v string) {
	p.add(metavalidation.ValidateLabelName(v, at)...)
}

func (p *problems) selector(at *field.Path, s *metav1.LabelSelector) {
	p.add(metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, at)...)
}

// oneOf requires one of the allowed values, which stand in the message in
// the given order; an empty value is "required".
func oneOf[T ~string](p *problems, at *field.Path, v T, allowed ...T) {
	if v == "" {
		p.required(at, "")
		return
	}
	supported(p, at, v, allowed...)
}

// supported is oneOf where an empty value is just another unsupported one.
func supported[T ~string](p *problems, at *field.Path, v T, allowed ...T) bool {
	for _, a := range allowed {
		if v == a {
			return true
		}
	}
	p.add(field.NotSupported(at, v, allowed))
	return false
}

// supportedIfSet checks an optional value.
func supportedIfSet[T ~string](p *problems, at *field.Path, v *T, allowed ...T) {
	if v != nil {
		supported(p, at, *v, allowed...)
	}
}

// names remembers what was seen, to find duplicates.
type names map[string]bool

// seen records v and says whether it was there before.
func (n names) seen(v string) bool {
	was := n[v]
	n[v] = true
	return was
}
