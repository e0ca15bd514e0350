package manifests

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func itoa(v int32) string { return strconv.FormatInt(int64(v), 10) }

// containers checks the main containers.
func (p *problems) containers(at *field.Path, s *corev1.PodSpec, volumes map[string]*corev1.VolumeSource) {
	if len(s.Containers) == 0 {
		p.required(at, "")
		return
	}
	used := names{}
	for i := range s.Containers {
		c, one := &s.Containers[i], at.Index(i)
		p.container(one, c, s, volumes)
		if used.seen(c.Name) {
			p.duplicate(one.Child("name"), c.Name)
		}
		p.lifecycleAndProbes(one, c, s)
		p.containerRestart(one, c)
	}
	p.portConflicts(at, s.Containers)
}

// initContainers checks the init containers; restartable ones may have what
// main containers have.
func (p *problems) initContainers(at *field.Path, s *corev1.PodSpec, volumes map[string]*corev1.VolumeSource) {
	used := names{}
	for i := range s.Containers {
		used[s.Containers[i].Name] = true
	}
	for i := range s.InitContainers {
		c, one := &s.InitContainers[i], at.Index(i)
		p.container(one, c, s, volumes)
		p.containerRestart(one, c)
		if used[c.Name] {
			p.duplicate(one.Child("name"), c.Name)
		} else if c.Name != "" {
			used[c.Name] = true
		}
		p.portConflicts(at, s.InitContainers[i:i+1])
		if IsRestartableInit(c) {
			p.lifecycleAndProbes(one, c, s)
			continue
		}
		const why = "may not be set for init containers without restartPolicy=Always"
		for name, set := range map[string]bool{
			"lifecycle": c.Lifecycle != nil, "livenessProbe": c.LivenessProbe != nil,
			"readinessProbe": c.ReadinessProbe != nil, "startupProbe": c.StartupProbe != nil,
		} {
			if set {
				p.forbidden(one.Child(name), why)
			}
		}
		for j, r := range c.ResizePolicy {
			if r.RestartPolicy == corev1.RestartContainer {
				p.invalid(one.Child("resizePolicy").Index(j).Child("restartPolicy"), r.RestartPolicy,
					"must not be set to 'RestartContainer' for non-sidecar initContainers")
			}
		}
	}
}

// container checks what all kinds of containers have in common.
func (p *problems) container(at *field.Path, c *corev1.Container, s *corev1.PodSpec, volumes map[string]*corev1.VolumeSource) {
	if c.Name == "" {
		p.required(at.Child("name"), "")
	} else {
		p.dnsLabel(at.Child("name"), c.Name)
	}
	if c.Image == "" {
		p.required(at.Child("image"), "")
	}
	oneOf(p, at.Child("terminationMessagePolicy"), c.TerminationMessagePolicy,
		corev1.TerminationMessageReadFile, corev1.TerminationMessageFallbackToLogsOnError)
	p.ports(at.Child("ports"), c.Ports)
	p.env(at.Child("env"), c.Env)
	p.envFrom(at.Child("envFrom"), c.EnvFrom)
	p.mounts(at.Child("volumeMounts"), c, volumes)
	oneOf(p, at.Child("imagePullPolicy"), c.ImagePullPolicy, corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	p.resources(at.Child("resources"), &c.Resources, p.containerResourceName, s.ResourceClaims)
	p.resizePolicy(at.Child("resizePolicy"), c.ResizePolicy, s.RestartPolicy)
	p.securityContext(at.Child("securityContext"), c.SecurityContext, s.HostUsers == nil || *s.HostUsers)
}

// imageSpaces refuses padding of the image, in pods only: templates may have
// had it for ever.
func (p *problems) imageSpaces(at *field.Path, cs []corev1.Container) {
	for i := range cs {
		if cs[i].Image != strings.TrimSpace(cs[i].Image) {
			p.invalid(at.Index(i).Child("image"), cs[i].Image, "must not have leading or trailing whitespace")
		}
	}
}

func (p *problems) env(at *field.Path, env []corev1.EnvVar) {
	for i := range env {
		e, one := &env[i], at.Index(i)
		if e.Name == "" {
			p.required(one.Child("name"), "")
		} else {
			p.invalid(one.Child("name"), e.Name, validation.IsRelaxedEnvVarName(e.Name)...)
		}
		if e.ValueFrom != nil {
			p.envSource(one.Child("valueFrom"), e)
		}
	}
}

func (p *problems) envSource(at *field.Path, e *corev1.EnvVar) {
	sources := 0
	v := e.ValueFrom
	if v.FieldRef != nil {
		sources++
		p.fieldRef(at.Child("fieldRef"), v.FieldRef, envFields)
	}
	if v.ResourceFieldRef != nil {
		sources++
		p.resourceFieldRef(at.Child("resourceFieldRef"), v.ResourceFieldRef, false)
	}
	if v.ConfigMapKeyRef != nil {
		sources++
		p.keyRef(at.Child("configMapKeyRef"), v.ConfigMapKeyRef.Name, v.ConfigMapKeyRef.Key)
	}
	if v.SecretKeyRef != nil {
		sources++
		p.keyRef(at.Child("secretKeyRef"), v.SecretKeyRef.Name, v.SecretKeyRef.Key)
	}
	if v.FileKeyRef != nil {
		sources++
	}
	switch {
	case sources == 0:
		p.invalid(at, "", "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`")
	case e.Value != "":
		p.invalid(at, "", "may not be specified when `value` is not empty")
	case sources > 1:
		p.invalid(at, "", "may not have more than one field specified at a time")
	}
}

func (p *problems) keyRef(at *field.Path, name, key string) {
	p.invalid(at.Child("name"), name, apivalidation.NameIsDNSSubdomain(name, false)...)
	if key == "" {
		p.required(at.Child("key"), "")
	} else {
		p.invalid(at.Child("key"), key, validation.IsConfigMapKey(key)...)
	}
}

func (p *problems) envFrom(at *field.Path, from []corev1.EnvFromSource) {
	for i := range from {
		e, one, sources := &from[i], at.Index(i), 0
		if e.Prefix != "" {
			p.invalid(one.Child("prefix"), e.Prefix, validation.IsRelaxedEnvVarName(e.Prefix)...)
		}
		source := func(at *field.Path, name string) {
			sources++
			if name == "" {
				p.required(at.Child("name"), "")
			} else {
				p.invalid(at.Child("name"), name, apivalidation.NameIsDNSSubdomain(name, true)...)
			}
		}
		if e.ConfigMapRef != nil {
			source(one.Child("configMapRef"), e.ConfigMapRef.Name)
		}
		if e.SecretRef != nil {
			source(one.Child("secretRef"), e.SecretRef.Name)
		}
		switch {
		case sources == 0:
			p.invalid(at, "", "must specify one of: `configMapRef` or `secretRef`")
		case sources > 1:
			p.invalid(at, "", "may not have more than one field specified at a time")
		}
	}
}

// containerRestart checks a container's own restart policy and rules.
func (p *problems) containerRestart(at *field.Path, c *corev1.Container) {
	switch {
	case c.RestartPolicy != nil:
		supported(p, at.Child("restartPolicy"), *c.RestartPolicy, corev1.ContainerRestartPolicyAlways,
			corev1.ContainerRestartPolicyNever, corev1.ContainerRestartPolicyOnFailure)
	case len(c.RestartPolicyRules) > 0:
		p.required(at.Child("restartPolicy"), "must specify restartPolicy when restart rules are used")
	}
	rules := at.Child("restartPolicyRules")
	if n := len(c.RestartPolicyRules); n > 20 {
		p.add(field.TooMany(rules, n, 20))
	}
	for i, r := range c.RestartPolicyRules {
		supported(p, rules.Index(i).Child("action"), r.Action,
			corev1.ContainerRestartRuleActionRestart, corev1.ContainerRestartRuleActionRestartAllContainers)
		codes := rules.Index(i).Child("exitCodes")
		if r.ExitCodes == nil {
			p.required(codes, "must be specified")
			continue
		}
		supported(p, codes.Child("operator"), r.ExitCodes.Operator,
			corev1.ContainerRestartRuleOnExitCodesOpIn, corev1.ContainerRestartRuleOnExitCodesOpNotIn)
		if n := len(r.ExitCodes.Values); n > 255 {
			p.add(field.TooMany(codes.Child("values"), n, 255))
		}
	}
}

func (p *problems) resizePolicy(at *field.Path, policy []corev1.ContainerResizePolicy, restart corev1.RestartPolicy) {
	used := names{}
	for i, r := range policy {
		if used.seen(string(r.ResourceName)) {
			p.duplicate(at.Index(i), r.ResourceName)
		}
		oneOf(p, at, r.ResourceName, corev1.ResourceCPU, corev1.ResourceMemory)
		oneOf(p, at, r.RestartPolicy, corev1.NotRequired, corev1.RestartContainer)
		if restart == corev1.RestartPolicyNever && r.RestartPolicy != corev1.NotRequired {
			p.invalid(at, r.RestartPolicy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'")
		}
	}
}

func (p *problems) lifecycleAndProbes(at *field.Path, c *corev1.Container, s *corev1.PodSpec) {
	grace := s.TerminationGracePeriodSeconds
	if l := c.Lifecycle; l != nil {
		in := at.Child("lifecycle")
		if l.PostStart != nil {
			p.handler(in.Child("postStart"), lifecycleHandler(l.PostStart), grace)
		}
		if l.PreStop != nil {
			p.handler(in.Child("preStop"), lifecycleHandler(l.PreStop), grace)
		}
		if l.StopSignal != nil && s.OS == nil {
			p.forbidden(in.Child("stopSignal"), "may not be set for containers with empty `spec.os.name`")
		}
	}
	if c.LivenessProbe != nil {
		p.probe(at.Child("livenessProbe"), c.LivenessProbe, grace, true)
	}
	if c.ReadinessProbe != nil {
		p.probe(at.Child("readinessProbe"), c.ReadinessProbe, grace, false)
		if g := c.ReadinessProbe.TerminationGracePeriodSeconds; g != nil {
			p.invalid(at.Child("readinessProbe", "terminationGracePeriodSeconds"), g, "must not be set for readinessProbes")
		}
	}
	if c.StartupProbe != nil {
		p.probe(at.Child("startupProbe"), c.StartupProbe, grace, true)
	}
}

func (p *problems) probe(at *field.Path, pr *corev1.Probe, grace *int64, once bool) {
	p.handler(at, handler{Exec: pr.Exec, HTTPGet: pr.HTTPGet, TCPSocket: pr.TCPSocket, GRPC: pr.GRPC}, grace)
	p.nonNegative(at.Child("initialDelaySeconds"), int64(pr.InitialDelaySeconds))
	p.nonNegative(at.Child("timeoutSeconds"), int64(pr.TimeoutSeconds))
	p.nonNegative(at.Child("periodSeconds"), int64(pr.PeriodSeconds))
	p.nonNegative(at.Child("successThreshold"), int64(pr.SuccessThreshold))
	p.nonNegative(at.Child("failureThreshold"), int64(pr.FailureThreshold))
	if g := pr.TerminationGracePeriodSeconds; g != nil && *g <= 0 {
		p.invalid(at.Child("terminationGracePeriodSeconds"), *g, "must be greater than 0")
	}
	if once && pr.SuccessThreshold != 1 {
		p.invalid(at.Child("successThreshold"), pr.SuccessThreshold, "must be 1")
	}
}

// handler is what probes and lifecycle hooks have in common.
type handler struct {
	Exec      *corev1.ExecAction
	HTTPGet   *corev1.HTTPGetAction
	TCPSocket *corev1.TCPSocketAction
	GRPC      *corev1.GRPCAction
	Sleep     *corev1.SleepAction
}

func lifecycleHandler(l *corev1.LifecycleHandler) handler {
	return handler{Exec: l.Exec, HTTPGet: l.HTTPGet, TCPSocket: l.TCPSocket, Sleep: l.Sleep}
}

func (p *problems) handler(at *field.Path, h handler, grace *int64) {
	handlers := 0
	check := func(set bool, name string, f func(*field.Path)) {
		switch {
		case !set:
		case handlers > 0:
			p.forbidden(at.Child(name), "may not specify more than 1 handler type")
		default:
			handlers++
			f(at.Child(name))
		}
	}
	check(h.Exec != nil, "exec", func(at *field.Path) {
		if len(h.Exec.Command) == 0 {
			p.required(at.Child("command"), "")
		}
	})
	check(h.HTTPGet != nil, "httpGet", func(at *field.Path) { p.httpGet(at, h.HTTPGet) })
	check(h.TCPSocket != nil, "tcpSocket", func(at *field.Path) { p.portNumberOrName(at.Child("port"), h.TCPSocket.Port) })
	check(h.GRPC != nil, "grpc", func(at *field.Path) { p.portNumberOrName(at.Child("port"), intstr.FromInt32(h.GRPC.Port)) })
	check(h.Sleep != nil, "sleep", func(at *field.Path) {
		if grace != nil && (h.Sleep.Seconds < 0 || h.Sleep.Seconds > *grace) {
			p.invalid(at, h.Sleep.Seconds, fmt.Sprintf("must be non-negative and less than terminationGracePeriodSeconds (%d)", *grace))
		}
	})
	if handlers == 0 {
		p.required(at, "must specify a handler type")
	}
}

func (p *problems) httpGet(at *field.Path, h *corev1.HTTPGetAction) {
	if h.Path == "" {
		p.required(at.Child("path"), "")
	}
	p.portNumberOrName(at.Child("port"), h.Port)
	supported(p, at.Child("scheme"), h.Scheme, corev1.URISchemeHTTP, corev1.URISchemeHTTPS)
	for _, header := range h.HTTPHeaders {
		p.invalid(at.Child("httpHeaders"), header.Name, validation.IsHTTPHeaderName(header.Name)...)
	}
}

// securityContext checks ids and contradictions; profiles and capabilities
// are Unsupported's business.
func (p *problems) securityContext(at *field.Path, sc *corev1.SecurityContext, hostUsers bool) {
	if sc == nil {
		return
	}
	p.userID(at.Child("runAsUser"), sc.RunAsUser)
	p.groupID(at.Child("runAsGroup"), sc.RunAsGroup)
	if m := sc.ProcMount; m != nil {
		supported(p, at.Child("procMount"), *m, corev1.DefaultProcMount, corev1.UnmaskedProcMount)
		if hostUsers && *m == corev1.UnmaskedProcMount {
			p.invalid(at.Child("procMount"), m, "`hostUsers` must be false to use `Unmasked`")
		}
	}
	if sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation {
		return
	}
	if sc.Privileged != nil && *sc.Privileged {
		p.invalid(at, sc, "cannot set `allowPrivilegeEscalation` to false and `privileged` to true")
	}
	if sc.Capabilities != nil {
		for _, c := range sc.Capabilities.Add {
			if c == "CAP_SYS_ADMIN" {
				p.invalid(at, sc, "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN")
			}
		}
	}
}
