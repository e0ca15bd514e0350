package manifests

import (
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// addQueryConversions lets the parameter codec read the options of the pod
// sub-resources from a URL query; the meta option types bring their own.
func addQueryConversions(s *runtime.Scheme) {
	must(s.AddConversionFunc((*url.Values)(nil), (*corev1.PodLogOptions)(nil), func(in, out any, _ conversion.Scope) error {
		return podLogOptions(*in.(*url.Values), out.(*corev1.PodLogOptions))
	}))
	must(s.AddConversionFunc((*url.Values)(nil), (*corev1.PodExecOptions)(nil), func(in, out any, _ conversion.Scope) error {
		q, o := *in.(*url.Values), out.(*corev1.PodExecOptions)
		o.Stdin, o.Stdout, o.Stderr, o.TTY = flag(q, "stdin"), flag(q, "stdout"), flag(q, "stderr"), flag(q, "tty")
		o.Container, o.Command = q.Get("container"), q["command"]
		return nil
	}))
	must(s.AddConversionFunc((*url.Values)(nil), (*corev1.PodAttachOptions)(nil), func(in, out any, _ conversion.Scope) error {
		q, o := *in.(*url.Values), out.(*corev1.PodAttachOptions)
		o.Stdin, o.Stdout, o.Stderr, o.TTY = flag(q, "stdin"), flag(q, "stdout"), flag(q, "stderr"), flag(q, "tty")
		o.Container = q.Get("container")
		return nil
	}))
	must(s.AddConversionFunc((*url.Values)(nil), (*corev1.PodPortForwardOptions)(nil), func(in, out any, _ conversion.Scope) error {
		q, o := *in.(*url.Values), out.(*corev1.PodPortForwardOptions)
		for _, v := range q["ports"] {
			p, err := strconv.ParseInt(v, 10, 32)
			if err != nil {
				return err
			}
			o.Ports = append(o.Ports, int32(p))
		}
		return nil
	}))
}

func podLogOptions(q url.Values, o *corev1.PodLogOptions) error {
	o.Container = q.Get("container")
	o.Follow, o.Previous, o.Timestamps = flag(q, "follow"), flag(q, "previous"), flag(q, "timestamps")
	o.InsecureSkipTLSVerifyBackend = flag(q, "insecureSkipTLSVerifyBackend")
	for name, into := range map[string]**int64{
		"sinceSeconds": &o.SinceSeconds, "tailLines": &o.TailLines, "limitBytes": &o.LimitBytes,
	} {
		if v := q.Get(name); v != "" {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return err
			}
			*into = &n
		}
	}
	if v := q.Get("sinceTime"); v != "" {
		t, err := time.Parse(time.RFC3339, v)
		if err != nil {
			return err
		}
		o.SinceTime = &metav1.Time{Time: t}
	}
	if v, ok := q["stream"]; ok && len(v) > 0 {
		o.Stream = &v[0]
	}
	return nil
}

// flag reads a boolean as upstream does: present is true, unless it says
// false or 0.
func flag(q url.Values, name string) bool {
	v, ok := q[name]
	return ok && len(v) > 0 && v[0] != "false" && v[0] != "False" && v[0] != "0"
}
