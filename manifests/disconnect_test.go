package manifests

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func TestDisconnectAnnotations(t *testing.T) {
	at := field.NewPath("metadata", "annotations")
	for _, c := range []struct{ key, value, wrong string }{
		{AnnotationStopDeadline, "10s", ""},
		{AnnotationStopDeadline, "24h", ""},
		{AnnotationStopDeadline, "9s", "from 10s on"},
		{AnnotationStopDeadline, "-1h", "from 10s on"},
		{AnnotationStopDeadline, "0", "from 10s on"},
		{AnnotationStopDeadline, "soon", "from 10s on"},
		{AnnotationStopDeadline, "", "from 10s on"},
		{AnnotationStopDeadline, "200000h", "from 10s on"},
		{AnnotationReplaceAfter, "0s", ""},
		{AnnotationReplaceAfter, "5m", ""},
		{AnnotationReplaceAfter, "never", ""},
		{AnnotationReplaceAfter, "Never", "or never"},
		{AnnotationReplaceAfter, "-5m", "or never"},
		{AnnotationReplaceAfter, "5", "or never"},
		{AnnotationOnReturn, "original", ""},
		{AnnotationOnReturn, "replacement", ""},
		{AnnotationOnReturn, "better", ""},
		{AnnotationOnReturn, "best", `"better"`},
	} {
		p := &problems{}
		p.disconnect(at, map[string]string{c.key: c.value, "other": "x"})
		text := ""
		if len(p.list) > 0 {
			text = p.list.ToAggregate().Error()
		}
		if (c.wrong == "") != (text == "") || !strings.Contains(text, c.wrong) || (text != "" && !strings.Contains(text, c.key)) {
			t.Errorf("%s=%q: %q, want %q", c.key, c.value, text, c.wrong)
		}
	}
	for name, c := range map[string]struct {
		daemon bool
		a      map[string]string
		wrong  string
	}{
		"daemon, replace":           {true, map[string]string{AnnotationReplaceAfter: "5m"}, "belongs to its node"},
		"daemon, stops":             {true, map[string]string{AnnotationStopDeadline: "5m"}, ""},
		"daemon, return":            {true, map[string]string{AnnotationOnReturn: "original"}, "no replacement"},
		"set, replace":              {false, map[string]string{AnnotationReplaceAfter: "5m"}, "declare-dead"},
		"set, never":                {false, map[string]string{AnnotationReplaceAfter: "never"}, ""},
		"set, replace, when it has": {false, map[string]string{AnnotationReplaceAfter: "5m", AnnotationStopDeadline: "1m"}, ""},
		"set, return":               {false, map[string]string{AnnotationOnReturn: "better"}, "no replacement"},
		"neither":                   {false, nil, ""},
	} {
		p := &problems{}
		tpl := &corev1.PodTemplateSpec{}
		tpl.Annotations = c.a
		p.disconnectSet(field.NewPath("spec", "template"), tpl, c.daemon)
		text := ""
		if len(p.list) > 0 {
			text = p.list.ToAggregate().Error()
		}
		if (c.wrong == "") != (text == "") || !strings.Contains(text, c.wrong) {
			t.Errorf("%s: %q, want %q", name, text, c.wrong)
		}
	}
}
